{{/* Pods of this release by component. Argument: dict "in" (list ...) "root" $. */}}
{{- define "pdserve.pods" -}}
matchLabels:
  {{- include "pdserve.selectorLabels" .root | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: {{ .in | toJson }}}
{{- end }}

{{- define "pdserve.policy.deny" -}}
podSelector:
  matchLabels:
    {{- include "pdserve.selectorLabels" . | nindent 4 }}
policyTypes: [Ingress, Egress]
{{- end }}

{{- define "pdserve.policy.dns" -}}
podSelector:
  matchLabels:
    {{- include "pdserve.selectorLabels" . | nindent 4 }}
policyTypes: [Egress]
egress:
  - to:
      - namespaceSelector: {}
      - ipBlock: {cidr: 169.254.20.10/32} # NodeLocal DNSCache
    ports:
      {{- range .Values.networkPolicy.dnsPorts }}
      - {protocol: UDP, port: {{ . }}}
      - {protocol: TCP, port: {{ . }}}
      {{- end }}
{{- end }}

{{/* Routers send traces. A URL without a port means that of its scheme. */}}
{{- define "pdserve.toCollector" -}}
{{- with .Values.config.router.otlp_traces_endpoint }}
{{- $url := urlParse . -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) }}
- ports:
    - {protocol: TCP, port: {{ $port }}}
  {{- with $.Values.networkPolicy.otlpTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "pdserve.policy.extra" -}}
podSelector:
  matchLabels:
    {{- include "pdserve.selectorLabels" . | nindent 4 }}
policyTypes: [Egress]
egress:
  {{- toYaml .Values.networkPolicy.extraEgress | nindent 2 }}
{{- end }}

{{- define "pdserve.toRedis" -}}
{{- if .Values.valkey.enabled -}}
- to:
    - podSelector:
        {{- include "pdserve.pods" (dict "in" (list "valkey") "root" .) | nindent 8 }}
  ports:
    - {protocol: TCP, port: {{ .Values.valkey.port }}}
{{- else -}}
- to:
    {{- range .Values.networkPolicy.externalRedis.cidrs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    - {protocol: TCP, port: {{ .Values.networkPolicy.externalRedis.port }}}
{{- end -}}
{{- end }}

{{- define "pdserve.policy.router" -}}
podSelector:
  {{- include "pdserve.pods" (dict "in" (list "router") "root" .) | nindent 2 }}
policyTypes: [Ingress, Egress]
ingress:
  - ports:
      - {protocol: TCP, port: {{ .Values.router.service.httpPort }}}
      - {protocol: TCP, port: {{ .Values.router.service.grpcPort }}}
    {{- with .Values.networkPolicy.clientsFrom }}
    from:
      {{- toYaml . | nindent 6 }}
    {{- end }}
  - ports:
      - {protocol: TCP, port: {{ .Values.router.service.httpPort }}}
    from: # a pod that ends asks a router to drain its worker; the pool controller beside the head asks for the load
      - podSelector:
          {{- include "pdserve.pods" (dict "in" (list "prefill" "decode" "ray-head") "root" .) | nindent 10 }}
  - ports:
      - {protocol: TCP, port: {{ .Values.router.metricsPort }}}
    from:
      {{- toYaml .Values.networkPolicy.metricsFrom | nindent 6 }}
egress:
  - to:
      - podSelector:
          {{- include "pdserve.pods" (dict "in" (list "prefill" "decode") "root" .) | nindent 10 }}
    ports:
      - {protocol: TCP, port: {{ .Values.worker.port }}}
  {{- include "pdserve.toRedis" . | nindent 2 }}
  {{- include "pdserve.toCollector" . | nindent 2 }}
{{- end }}

{{/* Control and data of the handoff. Any worker pairs with any other: a worker may change its role. */}}
{{- define "pdserve.policy.workers" -}}
podSelector:
  {{- include "pdserve.pods" (dict "in" (list "prefill" "decode") "root" .) | nindent 2 }}
policyTypes: [Ingress, Egress]
ingress:
  - from:
      - podSelector:
          {{- include "pdserve.pods" (dict "in" (list "router") "root" .) | nindent 10 }}
    ports:
      - {protocol: TCP, port: {{ .Values.worker.port }}}
  - from: &workers
      - podSelector:
          {{- include "pdserve.pods" (dict "in" (list "prefill" "decode") "root" .) | nindent 10 }}
    ports: &handoff
      - {protocol: TCP, port: {{ .Values.worker.port }}}
      - {protocol: TCP, port: {{ .Values.worker.dataPorts.first }}, endPort: {{ .Values.worker.dataPorts.last }}}
  - from:
      {{- toYaml .Values.networkPolicy.metricsFrom | nindent 6 }}
    ports:
      - {protocol: TCP, port: {{ .Values.worker.metricsPort }}}
egress:
  - to: *workers
    ports: *handoff
  - to:
      - podSelector:
          {{- include "pdserve.pods" (dict "in" (list "router") "root" .) | nindent 10 }}
    ports:
      - {protocol: TCP, port: {{ .Values.router.service.httpPort }}}
  {{- include "pdserve.toRedis" . | nindent 2 }}
{{- end }}

{{/* Ray between its own pods only: whoever reaches these ports can run code. */}}
{{- define "pdserve.policy.ray" -}}
podSelector:
  {{- include "pdserve.pods" (dict "in" (list "ray-head" "prefill" "decode") "root" .) | nindent 2 }}
policyTypes: [Ingress, Egress]
ingress:
  - from: &nodes
      - podSelector:
          {{- include "pdserve.pods" (dict "in" (list "ray-head" "prefill" "decode") "root" .) | nindent 10 }}
    ports: &ray
      - {protocol: TCP, port: 6379}
      - {protocol: TCP, port: 20000, endPort: 20999}
      - {protocol: TCP, port: 52365}
egress:
  - to: *nodes
    ports: *ray
{{- end }}

{{- define "pdserve.policy.rayHead" -}}
podSelector:
  {{- include "pdserve.pods" (dict "in" (list "ray-head") "root" .) | nindent 2 }}
policyTypes: [Egress]
egress:
  - to: # the autoscaler patches the RayCluster
      {{- range .Values.networkPolicy.apiServer.cidrs }}
      - ipBlock: {cidr: {{ . }}}
      {{- end }}
    ports:
      {{- range .Values.networkPolicy.apiServer.ports }}
      - {protocol: TCP, port: {{ . }}}
      {{- end }}
  - to:
      - podSelector:
          {{- include "pdserve.pods" (dict "in" (list "router") "root" .) | nindent 10 }}
    ports:
      - {protocol: TCP, port: {{ .Values.router.service.httpPort }}}
  {{- include "pdserve.toRedis" . | nindent 2 }}
{{- end }}

{{- define "pdserve.policy.valkey" -}}
podSelector:
  {{- include "pdserve.pods" (dict "in" (list "valkey") "root" .) | nindent 2 }}
policyTypes: [Ingress]
ingress:
  - from:
      - podSelector:
          {{- include "pdserve.pods" (dict "in" (list "router" "prefill" "decode" "ray-head") "root" .) | nindent 10 }}
    ports:
      - {protocol: TCP, port: {{ .Values.valkey.port }}}
{{- end }}
