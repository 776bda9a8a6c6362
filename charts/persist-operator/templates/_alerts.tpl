{{- /*
The rules of files/monitoring/alerts.yaml as a JSON object of groups: without those that are disabled, with values for thresholds, and with
annotations. Both forms are made of it.
*/ -}}
{{- define "persist.alerts" -}}
{{- $values := .Values.prometheusRule -}}
{{- $names := list -}}
{{- $groups := list -}}
{{- range $group := (.Files.Get "files/monitoring/alerts.yaml" | fromYaml).groups -}}
{{- $rules := list -}}
{{- range $rule := $group.rules -}}
{{- $names = append $names $rule.alert -}}
{{- if not (has $rule.alert $values.disabled) -}}
{{- $expr := $rule.expr -}}
{{- range $name, $value := $values.thresholds }}{{ $expr = replace (printf "@%s@" $name) (toString $value) $expr }}{{ end -}}
{{- $annotations := dict "summary" $rule.summary "description" $rule.description -}}
{{- with $values.runbookUrl }}{{ $_ := set $annotations "runbook_url" (replace "{alert}" (default $rule.alert $rule.runbook) .) }}{{ end -}}
{{- $rules = append $rules (dict "alert" $rule.alert "expr" $expr "for" (default $rule.for (get $values.for $rule.alert)) "severity" $rule.severity "annotations" $annotations) -}}
{{- end -}}
{{- end -}}
{{- with $rules }}{{ $groups = append $groups (dict "name" $group.name "rules" .) }}{{ end -}}
{{- end -}}
{{- range $name := concat $values.disabled (keys $values.for) -}}
{{- if not (has $name $names) }}{{ fail (printf "prometheusRule: there is no alert %s; docs/runbooks lists them" $name) }}{{ end -}}
{{- end -}}
{{- dict "groups" $groups | toJson -}}
{{- end -}}
