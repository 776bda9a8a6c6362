{{- /* A pod of `helm test` that runs a Python program. `root`, `name`, `program` and `args`; `account` when it calls the API server. */ -}}
{{- define "persist.testPod" -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "persist.fullname" .root }}-test-{{ .name }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "persist.labels" .root | nindent 4 }}
    app.kubernetes.io/component: test
  annotations: {{- include "persist.testHook" "1" | nindent 4 }}
spec:
  restartPolicy: Never
  activeDeadlineSeconds: 120
  automountServiceAccountToken: {{ hasKey . "account" }}
  {{- with .account }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 4 }}
  {{- with .root.Values.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .name | quote }}
      image: {{ include "persist.image" .root | quote }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: [python3, -c]
      args:
        - {{ .program | quote }}
        {{- range .args }}
        - {{ . | quote }}
        {{- end }}
      resources:
        requests: {cpu: 10m, memory: 32Mi}
        limits: {memory: 64Mi}
      securityContext: {{- toYaml .root.Values.containerSecurityContext | nindent 8 }}
{{- end -}}
{{- /* What makes an object a part of `helm test`. Lower weights are created first. */ -}}
{{- define "persist.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
