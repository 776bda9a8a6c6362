#!/usr/bin/env bash
# The kind cluster of the end-to-end tests: cluster.sh up | down | load IMAGE... | env
# Docker with a daemon: kind's official node image. Elsewhere podman, and a node image built by node-image/build.
. "$(dirname "$(readlink -f "$0")")/settings.sh"

# Prints what a shell needs to talk to the cluster: eval "$(tests/e2e/cluster/cluster.sh env)"
print_env() {
  printf 'export KUBECONFIG=%q PATH=%q:%q:"$PATH"\n' "$KUBECONFIG" "$TOOLS" "$STATE/bin"
  [ "$ENGINE" = docker ] || printf 'export KIND_EXPERIMENTAL_PROVIDER=podman CONTAINERS_CONF=%q\n' "$CONTAINERS_CONF"
}

# One control plane and $PERSIST_WORKERS workers; every node runs workloads. Idempotent: keeps a cluster that answers.
up() {
  command -v kind >/dev/null || die "kind is not installed: run 'make setup' or '.ci/tools.sh kind'"
  if kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
    if [ -s "$KUBECONFIG" ] && kubectl --request-timeout=5s get nodes >/dev/null 2>&1; then say "cluster $CLUSTER is up"; return; fi
    say "cluster $CLUSTER exists but does not answer: made anew"
    down
  fi

  local image=() i
  mkdir -p "$STATE"
  { printf 'kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nnodes:\n- role: control-plane\n'
    for ((i = 0; i < WORKERS; i++)); do echo '- role: worker'; done; } > "$STATE/$CLUSTER.yaml"

  if [ "$ENGINE" = podman ]; then
    [ "$(id -u)" = 0 ] || die "the podman way needs root (nodes are privileged containers); with Docker it does not"
    "$CLUSTER_SCRIPTS/node-image/build"
    image=(--image "$NODE_IMAGE")
  fi
  say "kind create cluster $CLUSTER ($ENGINE, $WORKERS worker(s))"
  kind create cluster --name "$CLUSTER" --config "$STATE/$CLUSTER.yaml" "${image[@]}" --wait 180s
  # Two nodes have to run drivers, executors, stores and the operator, so the control plane runs pods too.
  kubectl taint nodes --all node-role.kubernetes.io/control-plane- >/dev/null 2>&1 || true
  kubectl wait --for=condition=Ready nodes --all --timeout=120s >/dev/null
  kubectl -n kube-system rollout status deployment/coredns --timeout=120s >/dev/null
  kubectl get nodes -o wide
}

# True if this image, by its id, is on every node.
loaded() { # IMAGE ID NODE...
  local image=$1 id=$2 node
  shift 2
  for node in "$@"; do
    "$ENGINE" exec "$node" crictl inspecti -q "$image" 2>/dev/null | grep -q "\"sha256:$id\"" || return 1
  done
}

# Loads images of the local container engine on every node; skips an image whose id is already there.
load() {
  [ $# -gt 0 ] || die "usage: cluster.sh load IMAGE..."
  local image id nodes
  mapfile -t nodes < <(kind get nodes --name "$CLUSTER" 2>/dev/null)
  ((${#nodes[@]})) || die "cluster $CLUSTER is not up: run 'make cluster-up'"
  ARCHIVE=$(mktemp "$STATE/load.XXXXXX")
  trap 'rm -f "$ARCHIVE"' EXIT
  for image in "$@"; do
    id=$("$ENGINE" image inspect --format '{{.Id}}' "$image") || die "no image $image: run spark-images/build.sh"
    if loaded "$image" "${id#sha256:}" "${nodes[@]}"; then say "$image is on all nodes"; continue; fi
    say "loading $image"
    rm -f "$ARCHIVE"                             # podman refuses to add to an existing archive
    if [ "$ENGINE" = docker ]; then docker save -o "$ARCHIVE" "$image"; else podman save -q --format docker-archive -o "$ARCHIVE" "$image" >/dev/null; fi
    kind load image-archive --name "$CLUSTER" "$ARCHIVE" 2>/dev/null
  done
}

# Removes the cluster, but not images and caches. Idempotent.
down() {
  command -v kind >/dev/null || return 0
  # Kills the nodes first, because a regular stop waits ten seconds for each node's init.
  "$ENGINE" ps -q --filter "label=io.x-k8s.kind.cluster=$CLUSTER" 2>/dev/null | xargs -r "$ENGINE" kill >/dev/null 2>&1 || true
  kind delete cluster --name "$CLUSTER"
  rm -f "$KUBECONFIG" "$STATE/$CLUSTER.yaml"
}

command=${1:-}
shift || true
case $command in
  up | down | load) $command "$@" ;;
  env) print_env ;;
  *) die "usage: cluster.sh up | down | load IMAGE... | env" ;;
esac
