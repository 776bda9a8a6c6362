# Sourced by every script here: paths, versions, and the container engine that runs the nodes.
# Owns no state. Variables that a user may set: PERSIST_CACHE, PERSIST_CLUSTER, PERSIST_WORKERS, PERSIST_ENGINE (docker or podman), PREVIOUS.
set -euo pipefail

CLUSTER_SCRIPTS=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PERSIST_CACHE=${PERSIST_CACHE:-$HOME/.cache/persist-operator}
CLUSTER=${PERSIST_CLUSTER:-persist}
WORKERS=${PERSIST_WORKERS:-1}
TOOLS=$PERSIST_CACHE/bin
JARS=$PERSIST_CACHE/jars
STATE=$PERSIST_CACHE/kind                      # binaries, sources and archives of the node image; engine configuration; kubeconfig
KUBECONFIG_FILE=$STATE/$CLUSTER.kubeconfig

KUBERNETES_VERSION=1.34.3                      # the newest that runs on Debian 12's containerd 1.6 and on cgroup v1
ETCD_VERSION=3.6.7
COREDNS_VERSION=1.15.0
CRICTL_VERSION=1.36.0
KIND_VERSION=0.33.0
HELM_VERSION=3.22.0
COSIGN_VERSION=3.1.3
FLUX_SOURCE_VERSION=1.9.3
FLUX_KUSTOMIZE_VERSION=1.9.5
FLUX_HELM_VERSION=1.6.2                        # 1.6.3 needs a fork of helm that the module proxy may not have
KUEUE_VERSION=0.17.0
VOLCANO_VERSION=1.14.4                        # the newest of each for this Kubernetes
YUNIKORN_VERSION=1.8.0
PREVIOUS=${PREVIOUS:-d16a33565f4c0795a3fc735a3e19a46b8bb29c4c}     # what the test of an upgrade begins with; the last release, once there is one
VERSITYGW_VERSION=1.8.0
GO_VERSION=1.27.3                              # only where the machine has no Go
BASE_IMAGE=docker.io/library/debian:bookworm-slim
NODE_IMAGE=localhost/kindest/node:v$KUBERNETES_VERSION

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Prefers Docker with a running daemon, where kind uses its official node image. Otherwise podman, with the image built here.
container_engine() {
  if [ -n "${PERSIST_ENGINE:-}" ]; then echo "$PERSIST_ENGINE"
  elif command -v docker >/dev/null && timeout 10 docker info >/dev/null 2>&1 && [ "$(readlink -f "$(command -v docker)")" != "$STATE/shim/docker" ]; then echo docker
  else echo podman; fi
}
ENGINE=$(container_engine)

export PATH="$TOOLS:$STATE/bin:$PATH" KUBECONFIG=$KUBECONFIG_FILE
if [ "$ENGINE" = podman ]; then
  export KIND_EXPERIMENTAL_PROVIDER=podman CONTAINERS_CONF=$STATE/containers.conf
  export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=overlay
fi
