{{- define "pdserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* At most 40 characters: KubeRay appends its own suffixes and clips names at 50. */}}
{{- define "pdserve.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "pdserve.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "pdserve.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "pdserve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pdserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pdserve.labels" -}}
{{ include "pdserve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pdserve
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Arguments: dict "image" <image values> "root" $ "name" "router". */}}
{{- define "pdserve.image" -}}
{{- $missing := printf "image.%s.registry is not set: no image is published, build both and name your registry" .name -}}
{{- $name := printf "%s/%s" (required $missing .image.registry) .image.repository -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end }}

{{- define "pdserve.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "pdserve.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 10001
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Where each pod may be placed. Argument: the role's values. */}}
{{- define "pdserve.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The URL of Redis. The password reaches the process by reference and is in no manifest. */}}
{{- define "pdserve.redisEnv" -}}
{{- if .Values.valkey.enabled -}}
- name: PDSERVE_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.valkey.existingSecret }}
      key: {{ .Values.valkey.secretKey }}
- name: PDSERVE_REDIS_URL
  value: redis://:$(PDSERVE_REDIS_PASSWORD)@{{ include "pdserve.fullname" . }}-valkey:{{ .Values.valkey.port }}/0
{{- else if .Values.externalRedis.existingSecret -}}
- name: PDSERVE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.externalRedis.existingSecret }}
      key: {{ .Values.externalRedis.secretKey }}
{{- else -}}
- name: PDSERVE_REDIS_URL
  value: {{ required "valkey.enabled is false: set externalRedis.url or externalRedis.existingSecret" .Values.externalRedis.url | quote }}
{{- end -}}
{{- end }}

{{/* The admin key, where one is set: for routers, and for those who ask them. */}}
{{- define "pdserve.adminKeyEnv" -}}
{{- if .Values.router.adminKey.existingSecret -}}
- name: PDSERVE_ROUTER_ADMIN_KEY_FILE
  value: /etc/pdserve-admin/{{ .Values.router.adminKey.secretKey }}
{{- end -}}
{{- end }}

{{- define "pdserve.adminKeyMount" -}}
{{- if .Values.router.adminKey.existingSecret -}}
- name: admin-key
  mountPath: /etc/pdserve-admin
  readOnly: true
{{- end -}}
{{- end }}

{{/* Keys are files that the group of the processes alone can read: an environment is shown by too many tools. */}}
{{- define "pdserve.adminKeyVolume" -}}
{{- with .Values.router.adminKey.existingSecret -}}
- name: admin-key
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end -}}
{{- end }}

{{/* Ray's token, from the Secret that KubeRay makes for the cluster. Only for containers KubeRay does not know. */}}
{{- define "pdserve.rayTokenEnv" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "pdserve.fullname" . }}
      key: auth_token
{{- end }}

{{/* Homes and caches: the root file system is read-only. */}}
{{- define "pdserve.writableEnv" -}}
- name: HOME
  value: /home/pdserve
- name: TRITON_CACHE_DIR
  value: /home/pdserve/.triton
{{- end }}

{{- define "pdserve.commonMounts" -}}
- name: config
  mountPath: /etc/pdserve
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/pdserve
{{- if .Values.model.existingClaim }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
{{- end }}
{{- end }}

{{/* Certificates of the roles that a pod can take. Arguments: dict "roles" (list ...) "root" $. */}}
{{- define "pdserve.tlsMounts" -}}
{{- if .root.Values.tls.enabled -}}
{{- range .roles }}
- name: tls-{{ . }}
  mountPath: /etc/pdserve-tls/{{ . }}
  readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{/* Readable by the group of the processes alone. Kubernetes brings a changed Secret to the pods within a minute. */}}
{{- define "pdserve.tlsVolumes" -}}
{{- if .root.Values.tls.enabled -}}
{{- range .roles }}
- name: tls-{{ . }}
  secret:
    secretName: {{ index $.root.Values.tls.existingSecrets . }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- end }}

{{- define "pdserve.commonVolumes" -}}
- name: config
  configMap:
    name: {{ include "pdserve.fullname" . }}-config
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
{{- if .Values.model.existingClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.existingClaim }}
    readOnly: true
{{- end }}
{{- end }}
