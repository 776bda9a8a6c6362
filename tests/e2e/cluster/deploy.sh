# Sourced by run.sh and by examples/cluster/up.sh, after settings.sh: Redis and S3 in a cluster that is up, and their Secret in other namespaces.
# Idempotent: a second run on a kept cluster uses the same stores and passwords.
STORES=$CLUSTER_SCRIPTS/../stores

step() { local start=$SECONDS; say "$1"; shift; "$@"; say "$((SECONDS - start)) s"; }

random() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n'; }

stores() {
  local access=persist secret_key
  secret_key=$(random)
  kubectl create namespace persist-stores --dry-run=client -o yaml | kubectl apply -f - >/dev/null
  kubectl -n persist-stores get secret persist-store >/dev/null 2>&1 || kubectl -n persist-stores create secret generic persist-store \
    --from-literal=redis-password="$(random)" --from-literal=access-key=$access --from-literal=secret-key="$secret_key" \
    --from-literal=aws-credentials="$(printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' $access "$secret_key")" >/dev/null
  kubectl -n persist-stores apply -f "$STORES/stores.yaml" >/dev/null
  kubectl -n persist-stores rollout status deployment/redis --timeout=120s
  kubectl -n persist-stores rollout status deployment/s3 --timeout=120s
}

# Creates the namespace and copies a Secret of the stores into it.
secret() { # NAMESPACE SECRET
  kubectl create namespace "$1" --dry-run=client -o yaml | kubectl apply -f - >/dev/null
  kubectl -n persist-stores get secret "$2" -o json |
    python3 -c 'import json, sys; s = json.load(sys.stdin); s["metadata"] = {"name": sys.argv[2], "namespace": sys.argv[1]}; json.dump(s, sys.stdout)' "$1" "$2" |
    kubectl apply -f - >/dev/null
}

# As many clusters demand it of the namespaces of workloads.
restricted() { # NAMESPACE
  kubectl label --overwrite namespace "$1" pod-security.kubernetes.io/enforce=restricted >/dev/null
}

# The tag is always dev; the annotation forces a new pod for a new build on a kept cluster.
chart() { # VALUES
  local build
  build=$("$ENGINE" image inspect --format '{{.Id}}' localhost/persist-operator:dev)
  helm upgrade --install persist-operator "$CLUSTER_SCRIPTS/../../../charts/persist-operator" --namespace persist-system --values "$1" \
    --set-string "podAnnotations.build=$build" --wait --timeout 180s
}
