//! Settings of proxies: the kind ProxyConfig (`networking.istio.io`), and [`ProxySettings`] of the mesh configuration,
//! of the annotation `proxy.istio.io/config` and of a proxy's node.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{
    Duration, Labels,
    connection_settings::{self, ConnectionSettings},
    destination_rule::WorkloadSelector,
    mesh_config::{self, IgnoredValue},
    own_settings::{OwnSettings, StatsMatcher},
    proxy_tracing::{ProxyTracing, TracingServiceName},
    selects,
};

/// `spec` of a ProxyConfig. It applies when a proxy starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxyConfig {
    /// Labels of the pods; `None`: all of the namespace, or of the mesh in the root namespace.
    pub selector: Option<WorkloadSelector>,
    /// Number of worker threads; 0: one for each core.
    pub concurrency: Option<u32>,
    /// Environment variables of the proxy.
    pub environment_variables: BTreeMap<String, String>,
    /// Image of the proxy.
    pub image: Option<ProxyImage>,
}

impl ProxyConfig {
    /// Returns the labels of the pods to which it applies.
    pub fn labels(&self) -> Option<&Labels> {
        self.selector.as_ref().map(|selector| &selector.match_labels)
    }
}

/// Image of a proxy. `skysail up` runs its own proxy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxyImage {
    /// Variant, such as `distroless`.
    pub image_type: String,
}

/// Settings with which a proxy starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartSettings {
    /// Number of worker threads; 0: one for each core.
    pub concurrency: Option<u32>,
    /// Environment variables.
    pub variables: BTreeMap<String, String>,
    /// Id of the mesh, which the mesh configuration alone sets; empty: the default.
    pub mesh_id: String,
    /// How connections reach the proxy.
    pub interception: Option<Interception>,
    /// Time limit of the proxy's drain when its pod ends.
    pub drain: Option<Duration>,
    /// Name of the proxy in traces.
    pub tracing_service_name: Option<TracingServiceName>,
    /// Whether the metrics of the workload are served along with those of the proxy.
    pub merges_metrics: Option<bool>,
    /// Settings of the proxy's own configuration.
    pub own: OwnSettings,
}

/// How connections reach a proxy. Source: `istio.mesh.v1alpha1.ProxyConfig.InboundInterceptionMode`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Interception {
    /// They are redirected.
    #[default]
    Redirect,
    /// They are redirected and keep their source address, where that is supported.
    Tproxy,
    /// Programs address the proxy's ports themselves.
    None,
}

/// Probes of WorkloadGroups by namespace and name, as written.
pub type GroupProbes = BTreeMap<(String, String), serde_json::Value>;

impl StartSettings {
    /// Returns the settings of a ProxyConfig.
    fn of(config: &ProxyConfig) -> Self {
        let variables = config.environment_variables.clone();
        Self { concurrency: config.concurrency, variables, ..Self::default() }
    }

    /// Replaces the settings that `over` sets. The id of the mesh stays.
    pub fn overlay(&mut self, over: Self) {
        self.concurrency = over.concurrency.or(self.concurrency);
        self.variables.extend(over.variables);
        self.interception = over.interception.or(self.interception);
        self.drain = over.drain.or(self.drain);
        self.tracing_service_name = over.tracing_service_name.or(self.tracing_service_name);
        self.merges_metrics = over.merges_metrics.or(self.merges_metrics);
        self.own.overlay(over.own);
    }
}

/// Sources of the settings with which the proxies of a mesh start.
#[derive(Clone, Debug, PartialEq)]
pub struct StartSources {
    /// Namespace whose ProxyConfig applies to the whole mesh.
    pub root_namespace: String,
    /// Settings of the mesh configuration.
    pub mesh: StartSettings,
    /// ProxyConfigs with their namespaces, the oldest first.
    pub configs: Vec<(String, ProxyConfig)>,
    /// Probes that the proxies of machines run.
    pub probes: GroupProbes,
}

impl Default for StartSources {
    fn default() -> Self {
        Self {
            root_namespace: mesh_config::NAMESPACE.to_owned(),
            mesh: StartSettings::default(),
            configs: Vec::new(),
            probes: GroupProbes::new(),
        }
    }
}

impl StartSources {
    /// Returns the settings with which a proxy starts. `annotated` are those of its pod's annotation. Precedence is
    /// Istio's: the ProxyConfig that selects the pod, the annotation, the ProxyConfigs without a selector of the
    /// namespace and of the root namespace, the mesh configuration. Of several ProxyConfigs the oldest applies.
    pub fn settings(&self, namespace: &str, labels: &Labels, annotated: StartSettings) -> StartSettings {
        let first = |namespace: &str, applies: &dyn Fn(&ProxyConfig) -> bool| {
            let mut configs = self.configs.iter().filter(|(of, _)| of == namespace).map(|(_, config)| config);
            configs.find(|config| applies(config)).map(StartSettings::of).unwrap_or_default()
        };
        let is_general = |config: &ProxyConfig| config.selector.is_none();
        let is_own = |config: &ProxyConfig| {
            config.labels().is_some_and(|selector| !selector.is_empty() && selects(selector, labels))
        };
        let mut made = self.mesh.clone();
        made.overlay(first(&self.root_namespace, &is_general));
        if namespace != self.root_namespace {
            made.overlay(first(namespace, &is_general));
        }
        made.overlay(annotated);
        made.overlay(first(namespace, &is_own));
        made
    }
}

/// Annotation of a pod with the settings of its proxy.
pub const ANNOTATION: &str = "proxy.istio.io/config";

/// Settings of the annotation that the control plane applies.
const EFFECTIVE: [&str; 5] =
    ["connectionSettings", "gatewayTopology", "proxyHeaders", "tracing", "tracingServiceName"];

/// Settings of the annotation that the program which starts the proxy reads and checks.
const STARTING: [&str; 8] = [
    "concurrency",
    "proxyMetadata",
    "interceptionMode",
    "terminationDrainDuration",
    "holdApplicationUntilProxyStarts",
    "drainDuration",
    "proxyStatsMatcher",
    "runtimeValues",
];

/// Maximum length in bytes of a text among the settings of a proxy.
pub const MAX_TEXT: usize = 1_024;

/// Settings of a proxy. Source: `istio.mesh.v1alpha1.ProxyConfig`. Most of its fields concern the start of a proxy and
/// are read by its agent.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxySettings {
    /// Address of the control plane; read by the proxy's agent.
    pub discovery_address: IgnoredValue,
    /// Id of the mesh in telemetry; empty: the trust domain.
    pub mesh_id: String,
    /// Number of worker threads.
    pub concurrency: Option<u32>,
    /// Environment variables of the proxy.
    pub proxy_metadata: BTreeMap<String, String>,
    /// How connections reach the proxy.
    pub interception_mode: Option<Interception>,
    /// Time limit of the proxy's drain when its pod ends.
    pub termination_drain_duration: Option<Duration>,
    /// Whether the pod's programs start only once the proxy is ready. Those of `skysail up` always do.
    pub hold_application_until_proxy_starts: IgnoredValue,
    /// Headers that the proxy sets.
    pub proxy_headers: ProxyHeaders,
    /// Proxies in front of gateways.
    pub gateway_topology: GatewayTopology,
    /// Connections that the proxy accepts.
    pub connection_settings: Option<ConnectionSettings>,
    /// Name of the proxy in traces.
    pub tracing_service_name: Option<TracingServiceName>,
    /// Time limit of connections that a changed configuration no longer admits.
    pub drain_duration: Option<Duration>,
    /// Statistics of an Envoy besides those that it always has.
    pub proxy_stats_matcher: Option<StatsMatcher>,
    /// Runtime keys and their values.
    pub runtime_values: BTreeMap<String, String>,
    /// Traces without a Telemetry, and defaults with one.
    pub tracing: Option<ProxyTracing>,
}

/// The settings of a proxy that affect what the control plane sends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct HttpSettings {
    /// Headers that the proxy sets.
    pub proxy_headers: ProxyHeaders,
    /// Proxies in front of gateways.
    pub gateway_topology: GatewayTopology,
    /// Connections that the proxy accepts; `None`: those of the mesh configuration.
    pub connection_settings: Option<ConnectionSettings>,
    /// Traces; `None`: those of the mesh configuration.
    pub tracing: Option<ProxyTracing>,
    /// Name of the proxy in traces; `None`: that of the mesh configuration.
    pub tracing_service_name: Option<TracingServiceName>,
}

/// Proxies in front of a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct GatewayTopology {
    /// Number of proxies in front of the gateway whose `x-forwarded-for` is trusted.
    pub num_trusted_proxies: Option<u32>,
    /// Treatment of `x-forwarded-client-cert`.
    pub forward_client_cert_details: ForwardedClientCert,
    /// Whether connections begin with the PROXY protocol.
    pub proxy_protocol: Option<Empty>,
}

/// A message without fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
pub struct Empty {}

/// Treatment of `x-forwarded-client-cert`. Source: `istio.mesh.v1alpha1.ForwardClientCertDetails`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ForwardedClientCert {
    /// Default of the listener.
    #[default]
    Undefined,
    /// Removes it.
    Sanitize,
    /// Forwards it if the connection is mutual TLS.
    ForwardOnly,
    /// Appends the client's certificate if the connection is mutual TLS.
    AppendForward,
    /// Replaces it by the client's certificate.
    SanitizeSet,
    /// Forwards it always.
    AlwaysForwardOnly,
}

/// Headers that a proxy sets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ProxyHeaders {
    /// Treatment of `x-forwarded-client-cert` on inbound requests of sidecars.
    pub forwarded_client_cert: ForwardedClientCert,
    /// Parts of the client's certificate in `x-forwarded-client-cert`.
    pub set_current_client_cert_details: ClientCertDetails,
    /// Header `server` of responses.
    pub server: ServerHeader,
    /// Header `x-request-id`.
    pub request_id: Switch,
    /// Header `x-envoy-attempt-count`.
    pub attempt_count: Switch,
    /// Headers `x-envoy-*` that describe the decisions of the proxy.
    pub envoy_debug_headers: Switch,
    /// Headers with peer metadata.
    pub metadata_exchange_headers: ExchangeHeaders,
    /// Whether the case of HTTP/1.1 headers is preserved.
    pub preserve_http1_header_case: Option<bool>,
    /// Header `x-forwarded-port`.
    pub x_forwarded_port: OffByDefault,
    /// Header `x-forwarded-host`.
    pub x_forwarded_host: OffByDefault,
}

/// Parts of the client's certificate in `x-forwarded-client-cert`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct ClientCertDetails {
    /// Subject; on by default.
    pub subject: Option<bool>,
    /// Certificate.
    pub cert: Option<bool>,
    /// Certificate chain.
    pub chain: Option<bool>,
    /// DNS names; on by default.
    pub dns: Option<bool>,
    /// URI names; on by default.
    pub uri: Option<bool>,
}

/// Header `server` of responses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct ServerHeader {
    /// Whether the header of the server passes through.
    pub disabled: Option<bool>,
    /// Value; empty: the default of the listener.
    pub value: String,
}

/// A header that is on by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct Switch {
    /// Whether it is off.
    pub disabled: Option<bool>,
}

impl Switch {
    /// Returns whether the header is off.
    pub fn is_off(self) -> bool {
        self.disabled == Some(true)
    }
}

/// A header that is off by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct OffByDefault {
    /// Whether it is on.
    pub enabled: Option<bool>,
}

/// Headers with peer metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct ExchangeHeaders {
    /// Destinations.
    pub mode: ExchangeMode,
}

/// Destinations of headers with peer metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ExchangeMode {
    /// All.
    #[default]
    Undefined,
    /// Services of the mesh.
    InMesh,
}

impl ProxySettings {
    /// Reads the settings of an annotation. Also returns the names of settings that have no effect.
    ///
    /// # Errors
    /// Fails with the reason if the text is no YAML, or no settings.
    pub fn read(text: &str) -> Result<(Self, Vec<String>), String> {
        let Some(document) = skysail_yaml::embedded(text) else { return Ok(Default::default()) };
        let written = document.root.map_err(|error| error.message)?.to_json();
        let names = written.as_object().into_iter().flatten().map(|(name, _)| name.clone());
        let of_connections = written["connectionSettings"].as_object().into_iter().flatten();
        let of_connections = of_connections.map(|(name, _)| name);
        let of_connections =
            of_connections.filter(|name| !connection_settings::FIELDS.contains(&name.as_str()));
        let others = names
            .filter(|name| !STARTING.contains(&name.as_str()) && !EFFECTIVE.contains(&name.as_str()))
            .chain(of_connections.map(|name| format!("connectionSettings.{name}")))
            .collect();
        let settings = serde_json::from_value(written).map_err(|error| error.to_string())?;
        Ok((settings, others))
    }

    /// Returns the settings with which the proxy starts.
    pub fn start(&self) -> StartSettings {
        StartSettings {
            concurrency: self.concurrency,
            variables: self.proxy_metadata.clone(),
            mesh_id: self.mesh_id.clone(),
            interception: self.interception_mode,
            drain: self.termination_drain_duration,
            tracing_service_name: self.tracing_service_name,
            merges_metrics: None,
            own: OwnSettings {
                drain_duration: self.drain_duration,
                proxy_stats_matcher: self.proxy_stats_matcher.clone(),
                runtime_values: self.runtime_values.clone(),
            },
        }
    }

    /// Returns the settings that affect what the control plane sends.
    pub fn http(&self) -> HttpSettings {
        HttpSettings {
            proxy_headers: self.proxy_headers.clone(),
            gateway_topology: self.gateway_topology.clone(),
            connection_settings: self.connection_settings.clone(),
            tracing: self.tracing.clone(),
            tracing_service_name: self.tracing_service_name,
        }
    }
}

impl HttpSettings {
    /// Returns these settings with each field that `over` sets replaced by that of `over`.
    #[must_use]
    pub fn overlaid(&self, over: &Self) -> Self {
        Self {
            proxy_headers: self.proxy_headers.overlaid(&over.proxy_headers),
            gateway_topology: self.gateway_topology.overlaid(&over.gateway_topology),
            connection_settings: over
                .connection_settings
                .as_ref()
                .or(self.connection_settings.as_ref())
                .cloned(),
            // As in Istio, the setting is replaced as a whole.
            tracing: over.tracing.as_ref().or(self.tracing.as_ref()).cloned(),
            tracing_service_name: over.tracing_service_name.or(self.tracing_service_name),
        }
    }

    /// Returns the properties on which shared resources depend.
    pub fn shared(&self) -> SharedHeaders {
        let headers = &self.proxy_headers;
        SharedHeaders {
            hides_attempts: headers.attempt_count.is_off(),
            keeps_case: headers.preserve_http1_header_case == Some(true),
            forwards_host: headers.x_forwarded_host.enabled == Some(true),
        }
    }

    /// Removes texts that are too long or that no header may have, and numbers that a proxy would refuse.
    pub(crate) fn remove_bad_values(&mut self) {
        self.connection_settings.iter_mut().for_each(|settings| drop(settings.remove_bad()));
        self.tracing.iter_mut().for_each(|tracing| drop(tracing.remove_bad_tags()));
        let value = &mut self.proxy_headers.server.value;
        if !is_header_value(value) {
            value.clear();
        }
    }
}

/// Returns whether a header may have a value, by length and characters.
pub(crate) fn is_header_value(value: &str) -> bool {
    value.len() <= MAX_TEXT && value.bytes().all(|byte| byte == b'\t' || (b' '..=b'~').contains(&byte))
}

/// Headers on which shared resources depend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SharedHeaders {
    /// Whether requests have no `x-envoy-attempt-count`.
    pub hides_attempts: bool,
    /// Whether the case of HTTP/1.1 headers is preserved.
    pub keeps_case: bool,
    /// Whether rewritten requests have `x-forwarded-host`.
    pub forwards_host: bool,
}

impl GatewayTopology {
    fn overlaid(&self, over: &Self) -> Self {
        Self {
            num_trusted_proxies: over.num_trusted_proxies.or(self.num_trusted_proxies),
            forward_client_cert_details: over
                .forward_client_cert_details
                .or(self.forward_client_cert_details),
            proxy_protocol: over.proxy_protocol.or(self.proxy_protocol),
        }
    }
}

impl ForwardedClientCert {
    fn or(self, other: Self) -> Self {
        if self == Self::Undefined { other } else { self }
    }
}

impl ProxyHeaders {
    fn overlaid(&self, over: &Self) -> Self {
        let (details, other) = (over.set_current_client_cert_details, self.set_current_client_cert_details);
        let switch = |over: Switch, other: Switch| Switch { disabled: over.disabled.or(other.disabled) };
        let extra = |over: OffByDefault, other: OffByDefault| OffByDefault {
            enabled: over.enabled.or(other.enabled),
        };
        Self {
            forwarded_client_cert: over.forwarded_client_cert.or(self.forwarded_client_cert),
            set_current_client_cert_details: ClientCertDetails {
                subject: details.subject.or(other.subject),
                cert: details.cert.or(other.cert),
                chain: details.chain.or(other.chain),
                dns: details.dns.or(other.dns),
                uri: details.uri.or(other.uri),
            },
            server: ServerHeader {
                disabled: over.server.disabled.or(self.server.disabled),
                value: text(&self.server.value, &over.server.value),
            },
            request_id: switch(over.request_id, self.request_id),
            attempt_count: switch(over.attempt_count, self.attempt_count),
            envoy_debug_headers: switch(over.envoy_debug_headers, self.envoy_debug_headers),
            metadata_exchange_headers: ExchangeHeaders {
                mode: match over.metadata_exchange_headers.mode {
                    ExchangeMode::Undefined => self.metadata_exchange_headers.mode,
                    mode @ ExchangeMode::InMesh => mode,
                },
            },
            preserve_http1_header_case: over.preserve_http1_header_case.or(self.preserve_http1_header_case),
            x_forwarded_port: extra(over.x_forwarded_port, self.x_forwarded_port),
            x_forwarded_host: extra(over.x_forwarded_host, self.x_forwarded_host),
        }
    }
}

fn text(own: &str, over: &str) -> String {
    if over.is_empty() { own } else { over }.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_overlaid_field_by_field() {
        let read = |text: &str| serde_json::from_str::<HttpSettings>(text).unwrap();
        let mesh = read(
            r#"{"concurrency": 2, "gatewayTopology": {"numTrustedProxies": 1, "proxyProtocol": {}},
                "proxyHeaders": {"server": {"value": "a"}, "requestId": {"disabled": true}}}"#,
        );
        let pod = read(
            r#"{"gatewayTopology": {"numTrustedProxies": 2},
                "proxyHeaders": {"requestId": {"disabled": false}, "xForwardedHost": {"enabled": true}}}"#,
        );
        let both = mesh.overlaid(&pod);
        assert_eq!(both.gateway_topology.num_trusted_proxies, Some(2));
        assert_eq!(both.gateway_topology.proxy_protocol, Some(Empty {}));
        assert_eq!(both.proxy_headers.server.value, "a");
        assert!(!both.proxy_headers.request_id.is_off());
        assert!(both.shared().forwards_host);
        assert_eq!(mesh.overlaid(&HttpSettings::default()), mesh);
    }

    /// An annotation of 15 KB could have gigabytes of aliases.
    #[test]
    fn long_aliases_are_refused() {
        let (text, aliases) = ("x".repeat(10_000), "*a, ".repeat(1_000));
        let refused = ProxySettings::read(&format!("a: &a {text}\nitems: [{aliases}]\n"));
        assert!(refused.is_err_and(|error| error.contains("more than 1572864 bytes")));
    }

    #[test]
    fn bad_values_are_removed() {
        let mut settings = HttpSettings::default();
        settings.proxy_headers.server.value = "a\r\nb: c".into();
        settings.remove_bad_values();
        assert_eq!(settings, HttpSettings::default());
    }

    #[test]
    fn proxies_start_with_the_most_specific_settings() {
        let config = |number, name: &str, labels: Option<&str>| {
            let match_labels = labels.map(|app| Labels::from([("app".into(), app.into())]));
            let selector = match_labels.map(|match_labels| WorkloadSelector { match_labels });
            let environment_variables = [(name.to_owned(), name.to_owned())].into();
            ProxyConfig { selector, concurrency: Some(number), environment_variables, ..Default::default() }
        };
        let start = |number, name: &str| StartSettings {
            concurrency: Some(number),
            variables: [(name.to_owned(), name.to_owned())].into(),
            ..StartSettings::default()
        };
        let mut sources = StartSources { mesh: start(1, "MESH"), ..StartSources::default() };
        let configs = [("istio-system", config(2, "ROOT", None)), ("shop", config(3, "NAMESPACE", None))];
        sources.configs.extend(configs.map(|(namespace, config)| (namespace.to_owned(), config)));
        sources.configs.push(("shop".into(), config(4, "WEB", Some("web"))));
        sources.configs.push(("shop".into(), config(5, "LATER", Some("web"))));
        let of = |namespace: &str, app: &str, annotated: StartSettings| {
            let labels = Labels::from([("app".into(), app.into())]);
            let made = sources.settings(namespace, &labels, annotated);
            (made.concurrency.unwrap(), made.variables.into_keys().collect::<Vec<_>>().join(" "))
        };
        let none = StartSettings::default;
        assert_eq!(of("other", "web", none()), (2, "MESH ROOT".into()));
        assert_eq!(of("istio-system", "web", none()), (2, "MESH ROOT".into()));
        assert_eq!(of("shop", "db", none()), (3, "MESH NAMESPACE ROOT".into()));
        assert_eq!(of("shop", "db", start(9, "POD")), (9, "MESH NAMESPACE POD ROOT".into()));
        assert_eq!(of("shop", "web", start(9, "POD")), (4, "MESH NAMESPACE POD ROOT WEB".into()));
    }
}
