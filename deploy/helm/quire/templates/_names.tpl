{{- define "quire.name" -}}{{ .Release.Name }}{{- end }}
{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
