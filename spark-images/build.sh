#!/usr/bin/env bash
# Builds the project's images from the Dockerfiles beside this file: with docker if its daemon runs, otherwise with buildah.
#   build.sh                  persist-engine, persist-operator, persist-spark
#   build.sh NAME...          some of: engine operator spark examples redis s3 kafka flux kueue schedulers
# Tags: localhost/persist-NAME:$PERSIST_TAG (dev). A change of the project's code rebuilds one small layer; a change of uv.lock rebuilds
# the dependencies. pip uses this machine's index, proxy and certificates through build secrets, none of which stays in an image.
. "$(dirname "$(readlink -f "$0")")/../tests/e2e/cluster/settings.sh"

ROOT=$(cd "$CLUSTER_SCRIPTS/../../.." && pwd)
TAG=${PERSIST_TAG:-dev}
CONTEXT=$ROOT/build/images
SECRETS=$(mktemp -d)
trap 'rm -rf "$SECRETS"' EXIT

pip_configuration() { # the configuration of this machine's pip, as a pip.conf for the build
  local option variable value
  echo "[global]"
  for option in index-url extra-index-url trusted-host proxy timeout; do
    variable=PIP_$(tr 'a-z-' 'A-Z_' <<<"$option")
    [ "$option" = timeout ] && variable=PIP_DEFAULT_TIMEOUT
    value=${!variable:-$(python3 -m pip config get "global.$option" 2>/dev/null || true)}
    [ -z "$value" ] || echo "$option = $value"
  done
  [ ! -s "$SECRETS/pip-ca" ] || echo "cert = /run/secrets/pip-ca"
}

prepare_secrets() {
  local bundle=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}
  if [ -s "$bundle" ]; then cat "$bundle" > "$SECRETS/pip-ca"; else : > "$SECRETS/pip-ca"; fi
  pip_configuration > "$SECRETS/pip-conf"
}

# Locked dependencies and wheels. Equal sources give equal bytes, so that unchanged layers come from the cache.
stage_python() {
  local package extra
  mkdir -p "$CONTEXT/requirements"
  rm -rf "$CONTEXT/wheels"
  (cd "$ROOT" && uv run --frozen --quiet python spark-images/catalog/build_catalog.py)
  for package in engine operator spark; do
    extra=()
    case $package in
      engine) extra=(--extra s3 --extra redis --extra cli) ;;
      operator) extra=(--extra ui) ;; # the console's Deployment runs this image
      spark) extra=(--extra spark) ;;
    esac
    (cd "$ROOT" && uv export --frozen --quiet --no-dev --no-emit-workspace --no-header --no-annotate --package "persist-$package" "${extra[@]}") \
      > "$CONTEXT/requirements/$package.txt"
    (cd "$ROOT" && SOURCE_DATE_EPOCH=315532800 uv build --quiet --wheel --package "persist-$package" --out-dir "$CONTEXT/wheels")
  done
}

stage_examples() {
  [ -s "$ROOT/examples/flights/data/flights.parquet" ] || (cd "$ROOT" && uv run --frozen python examples/flights/prepare.py)
  rm -rf "$CONTEXT/examples"
  mkdir -p "$CONTEXT/examples/flights"
  cp -r "$ROOT/examples/flights/data" "$CONTEXT/examples/flights/"
}

stage_jars() { # NAME: what .ci/tools.sh fetched under this name
  bash "$ROOT/.ci/tools.sh" "$1" || die "the image cannot be built without the jars of the $1"
  rm -rf "${CONTEXT:?}/$1"
  cp -r "$JARS/$1" "$CONTEXT/$1"
}

stage_s3() {
  local static=$PERSIST_CACHE/static/versitygw
  [ -x "$static" ] || CGO_ENABLED=0 GOBIN=$PERSIST_CACHE/static go install -ldflags '-s -w' "github.com/versity/versitygw/cmd/versitygw@v$VERSITYGW_VERSION"
  cp -u "$static" "$CONTEXT/"
}

stage_flux() {
  bash "$ROOT/.ci/tools.sh" flux registry || die "the image cannot be built without the controllers of Flux and a registry"
  mkdir -p "$CONTEXT/flux"
  cp -u "$PERSIST_CACHE"/flux/{source,kustomize,helm}-controller "$TOOLS/persist-registry" "$CONTEXT/flux/"
}

stage_kueue() {
  bash "$ROOT/.ci/tools.sh" kueue || die "the image cannot be built without the controller of Kueue"
  cp -u "$PERSIST_CACHE/kueue/kueue" "$CONTEXT/"
}

stage_schedulers() {
  bash "$ROOT/.ci/tools.sh" schedulers || die "the image cannot be built without Volcano and YuniKorn"
  cp -u "$PERSIST_CACHE"/schedulers/{volcano-scheduler,volcano-controllers,yunikorn-scheduler} "$CONTEXT/"
}

build() { # NAME DOCKERFILE [OPTION...]
  local name=$1 file=$2 start=$SECONDS
  shift 2
  local options=(--build-arg "TAG=$TAG" --secret "id=pip-conf,src=$SECRETS/pip-conf" --secret "id=pip-ca,src=$SECRETS/pip-ca" --file "$file" --tag "localhost/persist-$name:$TAG" "$@")
  if [ "$ENGINE" = docker ]; then DOCKER_BUILDKIT=1 docker build --quiet "${options[@]}" "$CONTEXT" >/dev/null
  else buildah build --quiet --layers --pull-never "${options[@]}" "$CONTEXT" >/dev/null; fi
  say "persist-$name:$TAG built in $((SECONDS - start)) s"
}

# Without a registry, the Debian base image is made from Debian packages, under its public name.
ensure_base() {
  [ "$ENGINE" = podman ] || return 0
  podman image exists "$BASE_IMAGE" && return 0
  podman pull -q "$BASE_IMAGE" 2>/dev/null || "$CLUSTER_SCRIPTS/node-image/build" --base
}

main() {
  local name wanted=("$@")
  ((${#wanted[@]})) || wanted=(engine operator spark)
  mkdir -p "$CONTEXT"
  prepare_secrets
  ensure_base
  if [[ " ${wanted[*]} " =~ \ (engine|operator|spark|examples|kafka|flux)\  ]]; then
    stage_python
    build base "$ROOT/spark-images/base/Dockerfile" --target runtime
    build build "$ROOT/spark-images/base/Dockerfile" --target build
  fi
  for name in "${wanted[@]}"; do
    case $name in
      engine | operator) build "$name" "$ROOT/spark-images/$name/Dockerfile" ;;
      spark) stage_jars connector; build spark "$ROOT/spark-images/spark/Dockerfile" ;;
      examples) stage_examples; build examples "$ROOT/spark-images/examples/Dockerfile" ;;
      redis) build redis "$ROOT/tests/e2e/images/redis/Dockerfile" ;;
      s3) stage_s3; build s3 "$ROOT/tests/e2e/images/s3/Dockerfile" ;;
      kafka) stage_jars broker; build kafka "$ROOT/tests/e2e/images/kafka/Dockerfile" ;;
      flux) stage_flux; build flux "$ROOT/tests/e2e/images/flux/Dockerfile" ;;
      schedulers) stage_schedulers; build schedulers "$ROOT/tests/e2e/images/schedulers/Dockerfile" ;;
      kueue) stage_kueue; build kueue "$ROOT/tests/e2e/images/kueue/Dockerfile" ;;
      *) die "no image called $name" ;;
    esac
  done
}

main "$@"
