# The static binaries of a node, built from Go modules into $STATE/bin. Sourced by build.
# About seven minutes on two free cores with cold caches; existing binaries are not built again.

build_binaries() {
  command -v go >/dev/null || die "Go 1.26 or newer is needed to build a node image without a registry"
  export CGO_ENABLED=0 GOFLAGS=-buildvcs=false
  mkdir -p "$STATE"/src/{k8s,etcd,dns,crictl}
  build_kubernetes
  [ -x "$STATE/bin/etcd" ] || build_etcd
  [ -x "$STATE/bin/coredns" ] || build_coredns
  [ -x "$STATE/bin/crictl" ] || build_crictl
  [ -x "$STATE/bin/kind" ] || GOBIN=$STATE/bin go install -ldflags '-s -w' "sigs.k8s.io/kind@v$KIND_VERSION"
}

# k8s.io/kubernetes names its staging modules v0.0.0: a module that depends on it has to replace each by the version of the same release.
# Without the version flags the binaries call themselves v0.0.0-master, and kubeadm refuses such a kubelet.
build_kubernetes() {
  local version=v$KUBERNETES_VERSION package=k8s.io/component-base/version command flags
  local commands=(kubeadm kubelet kubectl kube-apiserver kube-controller-manager kube-scheduler kube-proxy)
  flags="-s -w -X $package.gitVersion=$version -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES_VERSION")"
  flags+=" -X $package.gitCommit=$(printf '0%.0s' {1..40}) -X $package.gitTreeState=clean -X $package.buildDate=2026-01-01T00:00:00Z"
  flags+=" -X k8s.io/client-go/pkg/version.gitVersion=$version"
  ( cd "$STATE/src/k8s"
    [ -f go.sum ] || kubernetes_module "$version" "${commands[@]}"
    for command in "${commands[@]}"; do
      [ -x "$STATE/bin/$command" ] && continue
      say "building $command $version"
      go build -ldflags "$flags" -o "$STATE/bin/$command" "k8s.io/kubernetes/cmd/$command"
    done )
}

kubernetes_module() { # VERSION COMMAND...
  local version=$1 gomod staging command
  shift
  gomod=$(go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
  { printf 'module node\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes %s\n\n' "$version"
    grep -E '^\s+k8s.io/[a-z-]+ v0\.0\.0$' "$gomod" | awk '{print $1}' | sort -u |
      while read -r staging; do echo "replace $staging => $staging v0.${version#v1.}"; done; } > go.mod
  { printf '//go:build tools\n\npackage tools\n\nimport (\n'
    for command in "$@"; do printf '\t_ "k8s.io/kubernetes/cmd/%s"\n' "$command"; done
    echo ')'; } > tools.go
  go mod tidy
}

build_etcd() {
  ( cd "$STATE/src/etcd"
    printf 'module node\n\ngo 1.25\n' > go.mod
    printf 'package main\n\nimport (\n\t"os"\n\n\t"go.etcd.io/etcd/server/v3/etcdmain"\n)\n\nfunc main() { etcdmain.Main(os.Args) }\n' > main.go
    go get "go.etcd.io/etcd/server/v3@v$ETCD_VERSION"
    go mod tidy
    go build -ldflags '-s -w' -o "$STATE/bin/etcd" . )
}

build_coredns() {
  ( cd "$STATE/src/dns"
    printf 'module node\n\ngo 1.25\n' > go.mod
    go get "github.com/coredns/coredns@v$COREDNS_VERSION"
    go build -ldflags '-s -w' -o "$STATE/bin/coredns" github.com/coredns/coredns )
}

# Not `go install ...@version`, which requests a list of versions from the module proxy; some mirrors refuse it.
build_crictl() {
  ( cd "$STATE/src/crictl"
    printf 'module node\n\ngo 1.26\n\nrequire sigs.k8s.io/cri-tools v%s\n' "$CRICTL_VERSION" > go.mod
    printf '//go:build tools\n\npackage tools\n\nimport _ "sigs.k8s.io/cri-tools/cmd/crictl"\n' > tools.go
    go mod tidy
    go build -ldflags '-s -w' -o "$STATE/bin/crictl" sigs.k8s.io/cri-tools/cmd/crictl )
}
