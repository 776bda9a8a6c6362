#!/usr/bin/env bash
# make e2e: creates a cluster, images, stores and the chart, runs the tests, and removes everything. KEEP=1 keeps the cluster; ARGS go to pytest.
HERE=$(dirname "$(readlink -f "$0")")
. "$HERE/cluster/settings.sh"
. "$HERE/cluster/deploy.sh"
ROOT=$HERE/../..
IMAGES=(engine operator spark examples redis s3 kafka flux kueue)
LOADED=(localhost/persist-{engine,operator,examples,redis,s3,kafka,flux,kueue}:dev)       # examples contains spark

finish() {
  local status=$?
  if [ -n "${KEEP:-}" ]; then say "the cluster stays: eval \"\$($HERE/cluster/cluster.sh env)\""; else "$HERE/cluster/cluster.sh" down || true; fi
  exit $status
}

kafka() {
  kubectl -n persist-stores get secret kafka >/dev/null 2>&1 ||
    kubectl -n persist-stores create secret generic kafka --from-literal=password="$(random)" >/dev/null
  kubectl -n persist-stores apply -f "$STORES/kafka.yaml" >/dev/null
  kubectl -n persist-stores rollout status deployment/kafka --timeout=180s
}

namespaces() {
  local namespace
  for namespace in persist-system persist-e2e persist-e2e-gone persist-e2e-other; do
    secret $namespace persist-store
    restricted $namespace
  done
  secret persist-e2e kafka
}

trap finish EXIT
step "cluster" "$HERE/cluster/cluster.sh" up
step "images" "$ROOT/spark-images/build.sh" "${IMAGES[@]}"
step "earlier version" "$HERE/previous.sh" "$PREVIOUS"
step "load" "$HERE/cluster/cluster.sh" load "${LOADED[@]}" localhost/persist-{engine,operator,examples}:previous
step "stores" stores
step "kafka" kafka
step "namespaces" namespaces
step "chart" chart "$HERE/values.yaml"
cd "$ROOT"
step "tests" uv run --frozen pytest tests/e2e -m kind -q ${ARGS:-}
