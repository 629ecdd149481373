{{/* Ray's own ports, fixed so that NetworkPolicies can name them. The dashboard listens inside the pod only. */}}
{{- define "pdserve.rayPorts" -}}
node-manager-port: "20000"
object-manager-port: "20001"
runtime-env-agent-port: "20002"
dashboard-agent-grpc-port: "20003"
dashboard-agent-listen-port: "52365"
min-worker-port: "20100"
max-worker-port: "20999"
{{- end }}

{{- define "pdserve.rayProbes" -}}
startupProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  httpGet: {path: /api/healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{- define "pdserve.rayEnv" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
# The controller places workers by pool, not by GPU: a worker uses the GPUs of its pod.
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: GLOO_SOCKET_IFNAME
  value: {{ .Values.worker.socketInterface }}
- name: NCCL_SOCKET_IFNAME
  value: {{ .Values.worker.socketInterface }}
{{- end }}

{{- define "pdserve.rayMounts" -}}
{{ include "pdserve.commonMounts" . }}
- name: ray-logs
  mountPath: /tmp/ray
- name: shared-mem
  mountPath: /dev/shm
{{- end }}

{{/* Arguments: dict "shmSize" ... "root" $. */}}
{{- define "pdserve.rayVolumes" -}}
{{ include "pdserve.commonVolumes" .root }}
- name: ray-logs
  emptyDir: {}
- name: shared-mem
  emptyDir: {medium: Memory, sizeLimit: {{ .shmSize }}}
{{- end }}

{{/* One pool as a worker group. Arguments: dict "role" "prefill" "pool" <values> "root" $. */}}
{{- define "pdserve.workerGroup" -}}
{{- $root := .root -}}
{{- if or (lt (int .pool.replicas) (int .pool.minReplicas)) (gt (int .pool.replicas) (int .pool.maxReplicas)) -}}
{{- fail (printf "%s: expected minReplicas <= replicas <= maxReplicas, got %v, %v, %v" .role .pool.minReplicas .pool.replicas .pool.maxReplicas) -}}
{{- end -}}
groupName: {{ .role }}
replicas: {{ .pool.replicas }}
minReplicas: {{ .pool.minReplicas }}
maxReplicas: {{ .pool.maxReplicas }}
idleTimeoutSeconds: {{ .pool.idleTimeoutSeconds }}
rayStartParams:
  {{- include "pdserve.rayPorts" $root | nindent 2 }}
# What the pool controller asks for: one worker per pod.
resources:
  pd_{{ .role }}: "1"
template:
  metadata:
    labels:
      {{- include "pdserve.labels" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .role }}
      llm-d.ai/role: {{ .role }}
      llm-d.ai/inference-serving: "true"
      {{- with .pool.podLabels }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    annotations:
      checksum/config: {{ include "pdserve.config" $root | sha256sum }}
      {{- with .pool.podAnnotations }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  spec:
    automountServiceAccountToken: false
    enableServiceLinks: false
    terminationGracePeriodSeconds: {{ .pool.terminationGracePeriodSeconds }}
    {{- with $root.Values.imagePullSecrets }}
    imagePullSecrets:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- include "pdserve.podSecurityContext" $root | nindent 6 }}
      # gloo and NCCL bind ephemeral ports: the range that the NetworkPolicy opens between workers.
      sysctls:
        - name: net.ipv4.ip_local_port_range
          value: "{{ $root.Values.worker.dataPorts.first }} {{ $root.Values.worker.dataPorts.last }}"
    {{- include "pdserve.placement" .pool | nindent 4 }}
    containers:
      - name: ray-worker
        image: {{ include "pdserve.image" (dict "image" $root.Values.image.worker "root" $root "name" "worker") }}
        imagePullPolicy: {{ $root.Values.image.worker.pullPolicy }}
        env:
          {{- include "pdserve.rayEnv" $root | nindent 10 }}
          {{- include "pdserve.redisEnv" $root | nindent 10 }}
          {{- with include "pdserve.adminKeyEnv" $root }}{{ . | nindent 10 }}{{ end }}
          {{- include "pdserve.writableEnv" $root | nindent 10 }}
          - name: PDSERVE_URL
            value: http://{{ include "pdserve.fullname" $root }}:{{ $root.Values.router.service.httpPort }}
          {{- with .pool.extraEnv }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
        ports:
          - {name: pd-grpc, containerPort: {{ $root.Values.worker.port }}}
          - {name: pd-metrics, containerPort: {{ $root.Values.worker.metricsPort }}}
        # Of the Ray node. Whether the worker in it may get requests is told by its lease in Redis and its stream.
        {{- include "pdserve.rayProbes" $root | nindent 8 }}
        lifecycle:
          preStop:
            exec: {command: [python, /etc/pdserve/drain_pod.py, "{{ sub .pool.terminationGracePeriodSeconds 10 }}"]}
        resources:
          {{- toYaml .pool.resources | nindent 10 }}
        securityContext:
          {{- include "pdserve.containerSecurityContext" $root | nindent 10 }}
        volumeMounts:
          {{- include "pdserve.rayMounts" $root | nindent 10 }}
          {{- include "pdserve.tlsMounts" (dict "roles" (list "prefill" "decode") "root" $root) | nindent 10 }}
          {{- with include "pdserve.adminKeyMount" $root }}{{ . | nindent 10 }}{{ end }}
    volumes:
      {{- include "pdserve.rayVolumes" (dict "shmSize" .pool.shmSize "root" $root) | nindent 6 }}
      {{- include "pdserve.tlsVolumes" (dict "roles" (list "prefill" "decode") "root" $root) | nindent 6 }}
      {{- with include "pdserve.adminKeyVolume" $root }}{{ . | nindent 6 }}{{ end }}
{{- end }}
