#!/usr/bin/env bash
# make cluster-demo: a kind cluster with stores and the operator, and the namespace `demo`, in which examples/flights can be applied.
# Idempotent. `make cluster-down` removes all of it.
HERE=$(dirname "$(readlink -f "$0")")
ROOT=$HERE/../..
. "$ROOT/tests/e2e/cluster/settings.sh"
. "$ROOT/tests/e2e/cluster/deploy.sh"

namespaces() {
  local namespace
  for namespace in persist-system demo; do
    secret $namespace persist-store
    restricted $namespace
  done
}

step "cluster" "$ROOT/tests/e2e/cluster/cluster.sh" up
step "images" "$ROOT/spark-images/build.sh" engine operator spark examples redis s3
step "load" "$ROOT/tests/e2e/cluster/cluster.sh" load localhost/persist-{engine,operator,examples,redis,s3}:dev
step "stores" stores
step "namespaces" namespaces
step "chart" chart "$HERE/values.yaml"
kubectl config set-context --current --namespace demo >/dev/null
say "the operator runs; next: eval \"\$(tests/e2e/cluster/cluster.sh env)\" and kubectl apply -f examples/flights"
