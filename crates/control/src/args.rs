//! Command line of `skysaild`.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::Context as _;
use skysail_core::{connections, descriptors, names};
use skysail_inject::{Interceptor, Settings};
use skysail_xds::limits::Limits;

use crate::{access::Account, audit::Target};

/// Settings of the control plane.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Directory or file with Kubernetes, Istio and Gateway API objects (YAML or JSON); watched. May be repeated: an
    /// object in a later directory replaces the same object in an earlier one, with a warning if they differ.
    #[arg(long = "config", value_name = "DIR", required_unless_present_any = ["kubernetes", "kubeconfig"])]
    pub config: Vec<PathBuf>,
    /// Watch the objects of a Kubernetes cluster: the first of that of KUBECONFIG, of the user's kubeconfig and of the
    /// pod's service account. They replace the same objects of --config, with a warning.
    #[arg(long)]
    pub kubernetes: bool,
    /// Watch the objects of the cluster of this kubeconfig.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the control plane in the watched cluster. Without --ca-dir, its Secrets hold the certificate
    /// authority: `cacerts` a plugged-in one, else `istio-ca-secret` a self-signed one. The default is the variable
    /// POD_NAMESPACE, else istio-system.
    #[arg(long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
    /// Write the status of objects of Gateway API and of Ingresses to the watched cluster. Of several replicas, one does
    /// so: the holder of the Lease skysail-leader in the namespace of the control plane.
    #[arg(long)]
    pub write_status: bool,
    /// Deploy the proxies of Gateways of Gateway API on the watched cluster: for each Gateway a ServiceAccount, a Deployment
    /// and a Service of its own. Of several replicas, the holder of the Lease skysail-gateways-REVISION does so. Needs
    /// --injection-image.
    #[arg(long, requires = "injection_image")]
    pub deploy_gateways: bool,
    /// Directory with objects that a program has generated from those of --config; watched. Messages about a generated
    /// object name its source in --config.
    #[arg(long, value_name = "DIR")]
    pub generated: Option<PathBuf>,
    /// IP address of all listeners.
    #[arg(long, value_name = "IP", default_value = "0.0.0.0")]
    pub listen: IpAddr,
    /// TLS port for discovery and certificates; 0 selects a free port.
    #[arg(long, value_name = "PORT", default_value_t = names::DISCOVERY_TLS_PORT)]
    pub tls_port: u16,
    /// Plain-text port for discovery without authentication; 0 selects a free port. Disabled by default.
    #[arg(long, value_name = "PORT")]
    pub plain_port: Option<u16>,
    /// Port for readiness, metrics and admin pages; 0 selects a free port.
    #[arg(long, value_name = "PORT", default_value_t = names::CONTROL_ADMIN_PORT)]
    pub admin_port: u16,
    /// Service account that may read the admin pages over the network with its token. May be repeated. By default, only
    /// this machine or pod can read them. Readiness and metrics are always open.
    #[arg(long, value_name = "NAMESPACE/SERVICEACCOUNT")]
    pub admin_allow: Vec<Account>,
    /// File of the audit log, one JSON object per line; `-` is standard output. Records are appended; SIGHUP reopens
    /// the file. Disabled by default.
    #[arg(long, value_name = "FILE")]
    pub audit_log: Option<Target>,
    /// Issue a certificate only after its audit record is on disk. By default, a failed record is counted and logged,
    /// and the certificate is issued.
    #[arg(long, requires = "audit_log")]
    pub audit_required: bool,
    /// Directory of the certificate authority: a plugged-in one (Istio's ca-cert.pem, ca-key.pem, cert-chain.pem and
    /// root-cert.pem; watched), or a self-signed one, which skysaild creates and rotates. By default, the authority is
    /// in Secrets of the watched cluster (--namespace), or lasts until the process ends if no cluster is watched.
    #[arg(long, value_name = "DIR")]
    pub ca_dir: Option<PathBuf>,
    /// Directory of persistent state: virtual hosts to prefetch for each identity, key sets of token issuers, and the
    /// last addresses of DNS names, which stay in use while DNS does not answer. By default, a restart loses this
    /// state.
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Public key (PEM, EC P-256 or RSA) of the issuer of service account tokens; watched. Without this and
    /// --token-jwks, the tokens of the watched cluster are accepted, which its API server confirms (TokenReview).
    #[arg(long, value_name = "FILE")]
    pub token_key: Option<PathBuf>,
    /// Public keys of the issuer of service account tokens as a JSON Web Key Set, such as /openid/v1/jwks of a
    /// Kubernetes API server; watched.
    #[arg(long, value_name = "FILE")]
    pub token_jwks: Option<PathBuf>,
    /// Accepted issuer of service account tokens (claim `iss`). May be repeated.
    #[arg(long, value_name = "ISSUER", default_values = ["kubernetes/serviceaccount", "https://kubernetes.default.svc.cluster.local", "https://kubernetes.default.svc"])]
    pub token_issuer: Vec<String>,
    /// Cluster of the pods in the configuration, and of proxies that declare no cluster.
    #[arg(long, value_name = "ID", default_value = "Kubernetes")]
    pub cluster_id: String,
    /// Maximum number of scopes. Proxies share a scope if all properties on which shared resources depend are equal,
    /// such as namespace, locality, network, Sidecar, and labels that routes match.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub max_scopes: usize,
    /// Maximum number of scopes that the proxies of one identity use.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub max_scopes_per_identity: usize,
    /// Maximum number of views of proxies whose pods are not in the configuration. Such proxies share a view if they
    /// share a scope and declare the same labels, port names and canonical service.
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = at_least_one)]
    pub max_views: usize,
    /// Maximum number of views of the proxies of one identity whose pods are not in the configuration.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub max_views_per_identity: usize,
    /// Trust domain of workloads. The default is `trustDomain` of the mesh configuration.
    #[arg(long, value_name = "DOMAIN")]
    pub trust_domain: Option<String>,
    /// Maximum lifetime of workload certificates, such as 90m, 24h or 7d.
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub cert_ttl: Duration,
    /// DNS server for the names in ServiceEntries, as `IP` or `IP:PORT`. May be repeated. The default is the servers in
    /// /etc/resolv.conf.
    #[arg(long = "dns-server", value_name = "ADDRESS", value_parser = crate::resolve::parse_server)]
    pub dns_servers: Vec<SocketAddr>,
    /// Disable DNS lookups in the control plane: each proxy looks up names, as with Istio.
    #[arg(long)]
    pub no_dns: bool,
    /// Time after its last token within which a workload can renew its certificate without a token; `0s` disables the
    /// limit. Applies if tokens are accepted.
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration_or_zero)]
    pub token_interval: Duration,
    /// Maximum number of connections to the discovery ports; the limit of open files may lower it. Above it, the oldest
    /// connections without authentication or without a call in progress are closed.
    #[arg(long, value_name = "N", default_value_t = 50_000, value_parser = at_least_one)]
    pub max_connections: usize,
    /// Maximum number of connections to the discovery ports from one source address; 0 disables the limit. Increase it
    /// if many proxies share an address, such as behind an east-west gateway.
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    pub max_connections_per_address: usize,
    /// Maximum number of connections of one identity with calls in progress; 0 disables the limit. Calls on further
    /// connections are refused. A proxy has one connection, and briefly a second one when it requests a certificate.
    #[arg(long, value_name = "N", default_value_t = 12_500)]
    pub max_connections_per_identity: usize,
    /// Lifetime of the root of a self-signed authority. The root is rotated when a fifth of its lifetime is left.
    #[arg(long, value_name = "DURATION", default_value = "3650d", value_parser = duration)]
    pub ca_root_ttl: Duration,
    /// Disable the system call filter (seccomp) and no_new_privs.
    #[arg(long)]
    pub no_seccomp: bool,
    /// Timeout of a proxy that does not read pending responses; its connection is then closed.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub discovery_unread_timeout: Duration,
    /// Maximum number of discovery streams of one identity; each pod uses one. Further streams are refused.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub discovery_identity_streams: usize,
    /// Maximum memory in MiB for names that the proxies of one identity subscribe to and that no resource has. A stream
    /// above the limit is closed.
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub discovery_identity_names: u32,
    /// Access log of sidecars if the mesh configuration has no `accessLogFile`, such as /dev/stdout. Empty (default):
    /// no access log.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "",
        hide_default_value = true,
        overrides_with = "default_access_log"
    )]
    pub default_access_log: String,
    /// Write log lines as JSON.
    #[arg(long)]
    pub log_json: bool,
    /// Injection of sidecars.
    #[command(flatten)]
    pub injection: InjectionArgs,
}

/// Settings of the webhook for sidecar injection.
#[derive(Clone, Debug, clap::Args)]
pub struct InjectionArgs {
    /// Image of skysail-proxy. Enables the webhook for sidecar injection.
    #[arg(long, value_name = "IMAGE")]
    pub injection_image: Option<String>,
    /// HTTPS port of the webhook; 0 selects a free port.
    #[arg(long, value_name = "PORT", default_value_t = 15_017, requires = "injection_image")]
    pub injection_port: u16,
    /// Address of the control plane for injected sidecars. The control plane's certificate has the name.
    #[arg(
        long,
        value_name = "HOST:PORT",
        default_value = "istiod.istio-system.svc:15012",
        requires = "injection_image"
    )]
    pub injection_control_plane: String,
    /// Mesh configuration (MeshConfig, YAML) for injected sidecars, read at the start. Of its fields, `defaultConfig` and
    /// `enablePrometheusMerge` have an effect here.
    #[arg(long, value_name = "FILE", requires = "injection_image")]
    pub injection_mesh_config: Option<PathBuf>,
    /// A CNI plugin on the nodes redirects connections, instead of an init container in each pod.
    #[arg(long, requires = "injection_image")]
    pub injection_cni: bool,
    /// Revision of the control plane, which injected pods name.
    #[arg(long, value_name = "REVISION", default_value = "default", requires = "injection_image")]
    pub injection_revision: String,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("{text:?} is not a number of at least 1"))
}

/// Maximum number of connections without authentication or without a call in progress; sufficient even if all proxies
/// connect at once.
const MAX_UNAUTHENTICATED: usize = 4_096;

impl InjectionArgs {
    /// Returns the name at which sidecars and the API server reach the control plane.
    pub(crate) fn host(&self) -> &str {
        self.injection_control_plane.rsplit_once(':').map_or(&*self.injection_control_plane, |(host, _)| host)
    }

    /// Returns the settings of injection, if it is enabled.
    pub(crate) fn settings(&self, cluster: &str, trust_domain: &str) -> anyhow::Result<Option<Settings>> {
        let Some(image) = &self.injection_image else { return Ok(None) };
        let mut settings = Settings::new(image);
        if let Some(file) = &self.injection_mesh_config {
            let of_file = || format!("--injection-mesh-config {}", file.display());
            let text = std::fs::read_to_string(file).with_context(of_file)?;
            settings.apply_mesh_config(&text).with_context(of_file)?;
        }
        settings.control_plane.clone_from(&self.injection_control_plane);
        settings.is_default_revision = self.injection_revision == settings.revision;
        settings.revision.clone_from(&self.injection_revision);
        settings.cluster_id = cluster.to_owned();
        // Tokens and certificates are those of the running control plane.
        settings.trust_domain = trust_domain.to_owned();
        if self.injection_cni {
            settings.interceptor = Interceptor::Cni;
        }
        Ok(Some(settings))
    }
}

impl Args {
    /// Returns whether the objects of a cluster are watched.
    pub(crate) fn watches_cluster(&self) -> bool {
        self.kubernetes || self.kubeconfig.is_some()
    }

    /// Returns the namespace of the control plane.
    pub(crate) fn namespace(&self) -> anyhow::Result<String> {
        let of_pod = || std::env::var("POD_NAMESPACE").ok().filter(|name| !name.is_empty());
        let name = self.namespace.clone().or_else(of_pod).unwrap_or_else(|| "istio-system".to_owned());
        // It becomes a part of paths.
        let is_valid = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '-');
        let is_label = (1..=63).contains(&name.len()) && name.chars().all(is_valid);
        is_label.then_some(name).context("--namespace or POD_NAMESPACE is not the name of a namespace")
    }

    /// Returns the limits of discovery clients.
    pub(crate) fn limits(&self) -> Limits {
        let names = (self.discovery_identity_names as usize) << 20;
        Limits::new(self.discovery_unread_timeout, self.discovery_identity_streams, names)
    }

    /// Returns the limits of connections to the discovery ports.
    pub(crate) fn connections(&self) -> connections::Limits {
        let limit = |value: usize| (value > 0).then_some(value);
        let by_address = limit(self.max_connections_per_address);
        let by_identity = limit(self.max_connections_per_identity);
        let max = self.max_connections.min(descriptors::for_connections());
        connections::Limits { total: max, by_address, by_identity, evictable: MAX_UNAUTHENTICATED.min(max) }
    }
}

/// Maximum duration in seconds: dates in certificates and arithmetic on clocks have limits.
const MAX_SECONDS: u64 = 100 * 365 * 24 * 3600;

/// Parses a duration or `0s`.
fn duration_or_zero(text: &str) -> Result<Duration, String> {
    if text == "0s" { Ok(Duration::ZERO) } else { duration(text) }
}

/// Parses a duration such as `90s`, `15m`, `24h` or `7d`.
fn duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration such as 90s, 15m, 24h or 7d");
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(invalid)?;
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return Err(invalid()),
    };
    let number: u64 = number.parse().map_err(|_| invalid())?;
    match number.checked_mul(seconds) {
        Some(seconds @ 1..=MAX_SECONDS) => Ok(Duration::from_secs(seconds)),
        Some(0) => Err(invalid()),
        _ => Err(format!("{text:?} is too long; the maximum is 36500d")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(duration("24h").unwrap(), Duration::from_secs(24 * 3600));
        assert_eq!(duration("60s").unwrap(), Duration::from_secs(60));
        assert_eq!(duration("36500d").unwrap(), Duration::from_secs(MAX_SECONDS));
        for invalid in
            ["", "5", "h", "0s", "-1s", "1w", "99999999999999999999d", "36501d", "18446744073709551615s"]
        {
            assert!(duration(invalid).is_err(), "{invalid}");
        }
    }
}
