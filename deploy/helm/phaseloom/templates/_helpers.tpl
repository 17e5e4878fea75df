{{/* The labels of everything. Takes (dict "root" $ "component" "router"). */}}
{{- define "phaseloom.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "phaseloom.selector" . }}
{{- end }}

{{/* The labels by which a component's pods are found. Takes the same. */}}
{{- define "phaseloom.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The image of a service. Takes (dict "root" $ "service" "router"). */}}
{{- define "phaseloom.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ . }}/{{ end -}}
{{ $image.repository }}-{{ .service }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* The name of the Secret with all passwords and keys: the user's, or the chart's own. */}}
{{- define "phaseloom.authSecret" -}}
{{ .Values.global.authSecret | default (printf "%s-auth" .Release.Name) }}
{{- end }}

{{/* The name that NATS's chart gives to its services. */}}
{{- define "phaseloom.nats" -}}
{{- if contains "nats" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-nats{{ end }}
{{- end }}

{{/* How many servers keep each stream. */}}
{{- define "phaseloom.replicas" -}}
{{- if .Values.bus.url }}{{ .Values.bus.replicas }}{{ else if .Values.nats.config.cluster.enabled }}3{{ else }}1{{ end }}
{{- end }}

{{/* Where the NATS server is, or all of them. Takes (dict "root" $ "domain" ".<namespace>.svc"). */}}
{{- define "phaseloom.busUrl" -}}
{{- $nats := include "phaseloom.nats" .root -}}
{{- $cluster := .root.Values.nats.config.cluster -}}
{{- $urls := list -}}
{{- if .root.Values.bus.url -}}
{{- $urls = list .root.Values.bus.url -}}
{{- else if $cluster.enabled -}}
{{- range $i := until (int $cluster.replicas) -}}
{{- $urls = append $urls (printf "nats://%s-%d.%s-headless%s:4222" $nats $i $nats $.domain) -}}
{{- end -}}
{{- else -}}
{{- $urls = list (printf "nats://%s%s:4222" $nats .domain) -}}
{{- end -}}
{{- join "," $urls -}}
{{- end }}

{{/* The environment variables of every service. */}}
{{- define "phaseloom.env" -}}
- name: PHASELOOM_BUS_URL
  value: {{ include "phaseloom.busUrl" (dict "root" . "domain" "") | quote }}
- name: PHASELOOM_BUS_REPLICAS
  value: {{ include "phaseloom.replicas" . | quote }}
- name: PHASELOOM_BUS_USER
  value: mesh
- name: PHASELOOM_BUS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "phaseloom.authSecret" . }}, key: mesh-password}}
- name: PHASELOOM_LOG_FORMAT
  value: json
{{- with .Values.telemetry.otlpEndpoint }}
- name: PHASELOOM_TELEMETRY_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The environment variables that only one service has. Takes (dict "root" $ "name" "router"). */}}
{{- define "phaseloom.ownEnv" -}}
{{- $secret := include "phaseloom.authSecret" .root -}}
{{- if eq .name "scheduler" }}
- name: PHASELOOM_SCHEDULER_NAME
  value: $(POD_NAME)
- name: PHASELOOM_SCHEDULER_STATE_SECRET
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: state-secret}}
{{- else if eq .name "router" }}
- name: PHASELOOM_ROUTER_NAME
  value: $(POD_NAME)
- name: PHASELOOM_ROUTER_TENANTS
  value: {{ .root.Values.tenants | toJson | quote }}
{{- else if eq .name "gateway" }}
- name: PHASELOOM_GATEWAY_NAME
  value: $(POD_NAME)
- name: PHASELOOM_GATEWAY_PEER_HOST
  value: $(POD_IP)
- name: PHASELOOM_GATEWAY_PORT
  value: {{ .root.Values.gateway.port | quote }}
- name: PHASELOOM_GATEWAY_KEYS
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: gateway-keys}}
- name: PHASELOOM_GATEWAY_PASSWORDS
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: gateway-passwords}}
{{- else if eq .name "console" }}
- name: PHASELOOM_CONSOLE_PORT
  value: {{ .root.Values.console.port | quote }}
- name: PHASELOOM_CONSOLE_OPERATOR_KEY
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: operator-key}}
- name: PHASELOOM_CONSOLE_KEYS
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: gateway-keys}}
{{- end }}
{{- end }}

{{/* The environment variables that the user gives. Takes a map of names and values. */}}
{{- define "phaseloom.extraEnv" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ if kindIs "string" $value }}{{ $value | quote }}{{ else }}{{ $value | toJson | quote }}{{ end }}
{{- end }}
{{- end }}

{{/* The security context of every container but the one that makes a directory the mesh's. */}}
{{- define "phaseloom.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The security context of every pod; the images have this user. */}}
{{- define "phaseloom.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* A service answers /healthz as long as its event loop runs. Takes the port. */}}
{{- define "phaseloom.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /healthz, port: {{ . }}}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}

{{/*
A service without state, as a Deployment. Takes (dict "root" $ "name" "router" "values" .Values.router
"env" "<YAML of variables>" "port" 0 "scaled" false). port: the HTTP port; 0: it has none. scaled:
whether an autoscaler sets the number of replicas.
*/}}
{{- define "phaseloom.deployment" -}}
{{- $root := .root -}}
{{- $labels := dict "root" .root "component" .name -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $root.Release.Name }}-{{ .name }}
  labels: {{- include "phaseloom.labels" $labels | nindent 4 }}
spec:
  {{- if not .scaled }}
  replicas: {{ .values.replicas }}
  {{- end }}
  minReadySeconds: 5
  strategy:
    rollingUpdate: {maxUnavailable: 1, maxSurge: 0}
  selector:
    matchLabels: {{- include "phaseloom.selector" $labels | nindent 6 }}
  template:
    metadata:
      labels: {{- include "phaseloom.labels" $labels | nindent 8 }}
      annotations:
        # Other tenants are other settings: the pods start anew.
        phaseloom/tenants: {{ $root.Values.tenants | toJson | sha256sum | trunc 16 }}
    spec:
      automountServiceAccountToken: false
      # Kubernetes would set variables like PHASELOOM_GATEWAY_PORT, which would be settings of ours.
      enableServiceLinks: false
      securityContext: {{- include "phaseloom.podSecurity" $root | nindent 8 }}
      terminationGracePeriodSeconds: 30
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets: {{- range . }}{{ nindent 8 (printf "- name: %s" .) }}{{ end }}
      {{- end }}
      {{- with .values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include "phaseloom.selector" $labels | nindent 14 }}
      containers:
        - name: {{ .name }}
          image: {{ include "phaseloom.image" (dict "root" $root "service" .name) | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          env:
            {{- include "phaseloom.env" $root | nindent 12 }}
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            {{- with .env }}{{ . | nindent 12 }}{{ end }}
            {{- with .values.env }}{{ include "phaseloom.extraEnv" . | trim | nindent 12 }}{{ end }}
          ports:
            - {name: metrics, containerPort: 9464}
            {{- with .port }}
            - {name: http, containerPort: {{ . }}}
            {{- end }}
          {{- include "phaseloom.probes" "metrics" | nindent 10 }}
          resources: {{- toYaml .values.resources | nindent 12 }}
          securityContext: {{- include "phaseloom.containerSecurity" $root | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
      volumes:
        - name: tmp
          emptyDir: {}
{{- end }}

{{/* The Service in front of a Deployment. Takes (dict "root" $ "name" "gateway" "values" .Values.gateway). */}}
{{- define "phaseloom.service" -}}
{{- $labels := dict "root" .root "component" .name -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .root.Release.Name }}-{{ .name }}
  labels: {{- include "phaseloom.labels" $labels | nindent 4 }}
  {{- with .values.service.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ .values.service.type }}
  selector: {{- include "phaseloom.selector" $labels | nindent 4 }}
  ports:
    - {name: http, port: {{ .values.port }}, targetPort: http}
{{- end }}

{{/* Whole numbers as JSON: Helm reads large ones as floating point. */}}
{{- define "phaseloom.numbers" -}}
[{{ range $i, $number := . }}{{ if $i }},{{ end }}{{ $number | int64 }}{{ end }}]
{{- end }}
