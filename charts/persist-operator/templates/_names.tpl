{{- define "persist.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "persist.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "persist.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "persist.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "persist.ownLabels" -}}
app.kubernetes.io/name: {{ include "persist.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* The component keeps the test pod out of the Service and the disruption budget. */ -}}
{{- define "persist.selectorLabels" -}}
{{ include "persist.ownLabels" . }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "persist.consoleLabels" -}}
{{ include "persist.ownLabels" . }}
app.kubernetes.io/component: console
{{- end -}}

{{- define "persist.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{ include "persist.ownLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- range $name, $value := .Values.commonLabels }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "persist.serviceAccount" -}}
{{- default (ternary (include "persist.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- /* Begins the name of each image that the chart names itself. */ -}}
{{- define "persist.registry" -}}
{{- with .Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- end -}}

{{- define "persist.image" -}}
{{- $name := printf "%s%s" (include "persist.registry" .) .Values.image.repository -}}
{{- if .Values.image.digest -}}
{{ $name }}@{{ .Values.image.digest }}
{{- else -}}
{{ $name }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- /* The namespaces that the operator watches, as a JSON list; those where sinks may run are among them. Empty: all. */ -}}
{{- define "persist.watchNamespaces" -}}
{{- if .Values.watch.clusterWide -}}
{{- if .Values.watch.namespaces -}}
{{- fail "watch.clusterWide watches all namespaces: leave watch.namespaces empty" -}}
{{- end -}}
[]
{{- else -}}
{{- $own := list .Release.Namespace -}}
{{- concat .Values.watch.namespaces .Values.workload.namespaces | uniq | default $own | toJson -}}
{{- end -}}
{{- end -}}

{{- /* The namespaces where sinks may run, as a JSON list. */ -}}
{{- define "persist.workloadNamespaces" -}}
{{- $own := list .Release.Namespace -}}
{{- .Values.workload.namespaces | default .Values.watch.namespaces | default $own | uniq | toJson -}}
{{- end -}}

{{- /* The selector of this release's namespaces in the binding of an admission policy; nothing when the release watches all. */ -}}
{{- define "persist.namespaceSelector" -}}
{{- with include "persist.watchNamespaces" . | fromJsonArray -}}
namespaceSelector:
  matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
{{- end -}}
{{- end -}}

{{- /* The Secret with the key of graceful stops. The operator creates it: a random value in a template would be a new one at each rendering. */ -}}
{{- define "persist.stopKey" -}}
{{ include "persist.fullname" . }}-stop-key
{{- end -}}

{{- /* The Secrets with credentials of stores, each once, as a JSON list. The operator mounts all of them. */ -}}
{{- define "persist.storeSecrets" -}}
{{- $names := list -}}
{{- range $profile := .Values.storageProfiles -}}
{{- with $profile.secretName }}{{ $names = append $names . }}{{ end -}}
{{- end -}}
{{- $names | uniq | sortAlpha | toJson -}}
{{- end -}}
