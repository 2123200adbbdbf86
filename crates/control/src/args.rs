//! `skysaild`'s settings.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use skysail_core::{connections, descriptors, names};
use skysail_xds::limits::Limits;

use crate::{access::Account, audit::Target};

/// Command line of the control plane.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// A folder or file of Kubernetes, Istio and Gateway API objects (YAML or JSON), watched. Objects of a later one
    /// replace those of an earlier one, with a warning if they differ.
    #[arg(long = "config", value_name = "DIR", required = true)]
    pub config: Vec<PathBuf>,
    /// A folder of objects that a program wrote from those of --config, and that complete them, watched. Messages about them name the
    /// object in --config.
    #[arg(long, value_name = "DIR")]
    pub generated: Option<PathBuf>,
    /// The address to listen on.
    #[arg(long, value_name = "IP", default_value = "0.0.0.0")]
    pub listen: IpAddr,
    /// Discovery and certificates over TLS; 0 takes any free port.
    #[arg(long, value_name = "PORT", default_value_t = names::DISCOVERY_TLS_PORT)]
    pub tls_port: u16,
    /// Discovery in plain text and without authentication; off unless given. 0 takes any free port.
    #[arg(long, value_name = "PORT")]
    pub plain_port: Option<u16>,
    /// Readiness, metrics and debugging; 0 takes any free port.
    #[arg(long, value_name = "PORT", default_value_t = names::CONTROL_ADMIN_PORT)]
    pub admin_port: u16,
    /// A service account that may read the admin pages from elsewhere, with its token; may be given several times. Without, they are
    /// readable from this machine or pod only, except readiness and metrics, which are open.
    #[arg(long, value_name = "NAMESPACE/SERVICEACCOUNT")]
    pub admin_allow: Vec<Account>,
    /// Where the audit log goes, a JSON object a line: `-` for standard output, or a file, which is appended to and opened again at
    /// SIGHUP. Without, there is none.
    #[arg(long, value_name = "FILE")]
    pub audit_log: Option<Target>,
    /// Hand out no certificate before its record in the audit log is on disk. Without, a record that cannot be written is counted and
    /// logged, and the certificate is handed out.
    #[arg(long, requires = "audit_log")]
    pub audit_required: bool,
    /// Where the certificate authority is kept: Istio's ca-cert.pem, ca-key.pem, cert-chain.pem and root-cert.pem, watched; or
    /// one that is made here, whose root is replaced in time. Without, it lives as long as the process.
    #[arg(long, value_name = "DIR")]
    pub ca_dir: Option<PathBuf>,
    /// Where it is kept what was learned: what workloads use, which their proxies then have before they ask, and the addresses
    /// that names last had, which stay in force while DNS does not answer. Without, a restart learns it anew.
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// The public key (PEM, EC P-256 or RSA) of who issues service account tokens, watched. Without it and --token-jwks, no
    /// token is accepted.
    #[arg(long, value_name = "FILE")]
    pub token_key: Option<PathBuf>,
    /// The public keys of who issues service account tokens as a JSON web key set, such as what a Kubernetes API server
    /// serves as /openid/v1/jwks; watched.
    #[arg(long, value_name = "FILE")]
    pub token_jwks: Option<PathBuf>,
    /// Who issues service account tokens, as the tokens name them; may be given several times.
    #[arg(long, value_name = "ISSUER", default_values = ["kubernetes/serviceaccount", "https://kubernetes.default.svc.cluster.local", "https://kubernetes.default.svc"])]
    pub token_issuer: Vec<String>,
    /// The cluster of the pods that are known here, and of other proxies that do not name theirs.
    #[arg(long, value_name = "ID", default_value = "Kubernetes")]
    pub cluster_id: String,
    /// Different configurations (scopes) that are served at the same time, in all. Proxies share one if they are alike in namespace,
    /// locality, cluster, address families, capabilities, and labels that routes match.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one)]
    pub max_scopes: usize,
    /// Different configurations (scopes) that proxies of one identity use at the same time.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub max_scopes_per_identity: usize,
    /// Different views of proxies whose pods are not known, in all. Such proxies share one if they declare the same labels, names of
    /// ports and canonical service, and share a scope.
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = at_least_one)]
    pub max_views: usize,
    /// Different views of proxies of one identity whose pods are not known.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub max_views_per_identity: usize,
    /// The trust domain of identities; by default the mesh configuration's.
    #[arg(long, value_name = "DOMAIN")]
    pub trust_domain: Option<String>,
    /// How long workload certificates live, at most.
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub cert_ttl: Duration,
    /// A DNS server, `IP` or `IP:PORT`, to look up the names in ServiceEntries at; may be given several times. Without,
    /// those of /etc/resolv.conf.
    #[arg(long = "dns-server", value_name = "ADDRESS", value_parser = crate::resolve::server)]
    pub dns_servers: Vec<SocketAddr>,
    /// Look up no names: every proxy does so itself, as with Istio.
    #[arg(long)]
    pub no_dns: bool,
    /// Time after a workload's last token within which it may renew its certificate with that certificate alone, where tokens are
    /// accepted; `0s` for no limit.
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration_or_none)]
    pub token_interval: Duration,
    /// Connections to the discovery ports at the same time; at most what the limit of open files leaves room for. Above, those
    /// that have not authenticated or have no call in progress are closed, the oldest first.
    #[arg(long, value_name = "N", default_value_t = 50_000, value_parser = at_least_one)]
    pub max_connections: usize,
    /// Connections to the discovery ports from one source address; 0 for no limit. To be raised where many proxies share an
    /// address, as behind an east-west gateway.
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    pub max_connections_per_address: usize,
    /// Connections of one identity to the discovery ports with calls in progress; 0 for no limit. A call on a further one is refused.
    /// Each proxy has one, and another for a moment when it asks for a certificate.
    #[arg(long, value_name = "N", default_value_t = 12_500)]
    pub max_connections_per_identity: usize,
    /// How long the root lives of an authority that is made here; it is replaced when a fifth of that is left.
    #[arg(long, value_name = "DURATION", default_value = "3650d", value_parser = duration)]
    pub ca_root_ttl: Duration,
    /// Run without the filter of system calls (seccomp), and without no_new_privs.
    #[arg(long)]
    pub no_seccomp: bool,
    /// Time after which the connection of a proxy is closed that reads nothing of what waits for it.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub discovery_unread_timeout: Duration,
    /// Discovery streams of one identity, which is one for each of its pods. More are refused.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub discovery_identity_streams: usize,
    /// Memory for names that the proxies of one identity ask for and no resource has, in MiB. A stream that asks for more is ended.
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub discovery_identity_names: u32,
    /// Where sidecars write access logs if the mesh configuration has no `accessLogFile`, such as /dev/stdout; empty: nowhere.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "",
        hide_default_value = true,
        overrides_with = "default_access_log"
    )]
    pub default_access_log: String,
    /// Log lines as JSON.
    #[arg(long)]
    pub log_json: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("{text:?} is not a number from 1 up"))
}

/// Connections that have not authenticated: more are not needed even when every proxy comes at once.
const UNAUTHENTICATED: usize = 4_096;

impl Args {
    /// What clients of discovery may cost.
    pub(crate) fn limits(&self) -> Limits {
        let names = (self.discovery_identity_names as usize) << 20;
        Limits::new(self.discovery_unread_timeout, self.discovery_identity_streams, names)
    }

    /// How many connections the discovery ports take.
    pub(crate) fn connections(&self) -> connections::Limits {
        let limit = |most: usize| (most > 0).then_some(most);
        let by_address = limit(self.max_connections_per_address);
        let by_identity = limit(self.max_connections_per_identity);
        let most = self.max_connections.min(descriptors::for_connections());
        connections::Limits { most, by_address, by_identity, unproven: UNAUTHENTICATED.min(most) }
    }
}

/// Nothing lives longer: certificates cannot say every year, and clocks cannot add every duration.
const LONGEST: u64 = 100 * 365 * 24 * 3600;

/// The same, or `0s`.
fn duration_or_none(text: &str) -> Result<Duration, String> {
    if text == "0s" { Ok(Duration::ZERO) } else { duration(text) }
}

/// Reads `90s`, `15m`, `24h` or `7d`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a duration such as 90s, 15m, 24h or 7d");
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    match number.checked_mul(seconds) {
        Some(seconds @ 1..=LONGEST) => Ok(Duration::from_secs(seconds)),
        Some(0) => Err(wrong()),
        _ => Err(format!("{text:?} is too long; 36500d are the most")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(duration("24h").unwrap(), Duration::from_secs(24 * 3600));
        assert_eq!(duration("60s").unwrap(), Duration::from_secs(60));
        assert_eq!(duration("36500d").unwrap(), Duration::from_secs(LONGEST));
        for wrong in
            ["", "5", "h", "0s", "-1s", "1w", "99999999999999999999d", "36501d", "18446744073709551615s"]
        {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
