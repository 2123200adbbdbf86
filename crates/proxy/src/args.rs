//! The command line: as typed in ([`Args`]) and as used ([`Mode`]).

use std::{num::NonZeroUsize, path::PathBuf, thread::available_parallelism};

use anyhow::bail;

use crate::{
    bootstrap::{convert::Conversion, runtime},
    envoy::Envoy,
    overload::Limits,
};

/// How to run the sidecar: from an Envoy bootstrap file, or as the sidecar of a mesh.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Envoy bootstrap file, YAML or JSON.
    #[arg(long, value_name = "FILE", conflicts_with = "discovery")]
    bootstrap: Option<PathBuf>,

    /// Control plane to take certificates and configuration from, over TLS.
    #[arg(long, value_name = "HOST:PORT", requires_all = ["ca_root", "token", "node"])]
    discovery: Option<String>,

    /// PEM file of the certificates that the control plane's certificate must be signed by; watched.
    #[arg(long, value_name = "FILE", requires = "discovery")]
    ca_root: Option<PathBuf>,

    /// Service account token; read again whenever it is used, and watched.
    #[arg(long, value_name = "FILE", requires = "discovery")]
    token: Option<PathBuf>,

    /// JSON of the node (envoy.config.core.v3.Node) in the form of Istio's agent.
    #[arg(long, value_name = "FILE", requires = "discovery")]
    node: Option<PathBuf>,

    /// Run this Envoy in the sidecar's place, with certificates and configuration from the same control plane.
    /// Any public build will do; the control plane then leaves Istio's own filters out.
    #[arg(long, value_name = "PROGRAM", requires = "discovery")]
    envoy: Option<PathBuf>,

    /// Worker threads; by default as many as the CPUs this process may use.
    #[arg(long, value_name = "N")]
    concurrency: Option<NonZeroUsize>,

    /// Mark (SO_MARK) of every socket the sidecar opens, so that interception lets it through.
    #[arg(long, value_name = "N")]
    interception_mark: Option<u32>,

    /// Port of the admin page on 127.0.0.1; 0 for any free one. By default 15000, or what the bootstrap file says.
    #[arg(long, value_name = "PORT")]
    admin_port: Option<u16>,

    /// Port of /healthz/ready; 0 for any free one. By default 15021, with a bootstrap file none.
    #[arg(long, value_name = "PORT")]
    health_port: Option<u16>,

    /// Port of /stats/prometheus; 0 for any free one. By default 15090, with a bootstrap file none.
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,

    /// Series of Istio's metrics that each worker keeps at most, of requests and of connections; others are not counted.
    #[arg(long, value_name = "N", default_value_t = Limits::default().series)]
    max_metric_series: usize,

    /// Sets a limit, as a static layer of the bootstrap file's runtime would that comes after all others; may be given
    /// several times. Keys: skysail.overload.under_way, skysail.overload.late_ms, skysail.overload.refuse_ms,
    /// skysail.admission.drain_ms, skysail.admission.end_with_certificate, overload.premature_reset_total_stream_count.
    #[arg(long, value_name = "KEY=NUMBER", value_parser = setting)]
    runtime: Vec<(String, String)>,

    /// Seconds that requests under way may take after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    drain_seconds: u64,

    /// Run without the filter of system calls (seccomp), and without no_new_privs. It never applies to --envoy.
    #[arg(long)]
    no_seccomp: bool,

    /// Convert standard input to standard output and end: how the sidecar uses Envoy's descriptors without
    /// carrying them.
    #[arg(long, value_name = "FORM", hide = true, exclusive = true)]
    convert: Option<Conversion>,
}

/// What is to be done.
pub(crate) enum Mode {
    Convert(Conversion),
    Bootstrap(PathBuf, Common),
    Mesh(Mesh, Common),
    Envoy(Envoy),
}

/// Where a sidecar of a mesh gets everything from.
#[derive(Clone)]
pub(crate) struct Mesh {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) ca_root: PathBuf,
    pub(crate) token: PathBuf,
    pub(crate) node: PathBuf,
}

/// What holds in both modes.
pub(crate) struct Common {
    pub(crate) concurrency: usize,
    pub(crate) mark: Option<u32>,
    pub(crate) admin_port: Option<u16>,
    pub(crate) health_port: Option<u16>,
    pub(crate) metrics_port: Option<u16>,
    pub(crate) metric_series: usize,
    /// Keys of the runtime with their values.
    pub(crate) runtime: Vec<(String, String)>,
    pub(crate) drain: std::time::Duration,
    /// Whether the process confines itself to the system calls it needs.
    pub(crate) seccomp: bool,
}

impl Args {
    /// Checks what only makes sense together.
    pub(crate) fn mode(self) -> anyhow::Result<Mode> {
        if let Some(conversion) = self.convert {
            return Ok(Mode::Convert(conversion));
        }
        let common = Common {
            // That of the cgroup, too.
            concurrency: self
                .concurrency
                .or_else(|| available_parallelism().ok())
                .map_or(1, NonZeroUsize::get),
            mark: self.interception_mark,
            admin_port: self.admin_port,
            health_port: self.health_port,
            metrics_port: self.metrics_port,
            metric_series: self.max_metric_series,
            runtime: self.runtime,
            drain: std::time::Duration::from_secs(self.drain_seconds),
            seccomp: !self.no_seccomp,
        };
        match (self.bootstrap, self.discovery, self.ca_root, self.token, self.node) {
            (Some(file), ..) => Ok(Mode::Bootstrap(file, common)),
            (None, Some(discovery), Some(ca_root), Some(token), Some(node)) => {
                let (host, port) = host_and_port(&discovery)?;
                let mesh = Mesh { host, port, ca_root, token, node };
                Ok(match self.envoy {
                    Some(program) => Mode::Envoy(Envoy { program, mesh, common }),
                    None => Mode::Mesh(mesh, common),
                })
            }
            _ => bail!(
                "give either --bootstrap FILE, or --discovery HOST:PORT with --ca-root, --token and --node"
            ),
        }
    }
}

/// A key of the runtime with its value, which are in order.
fn setting(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("give a key and a number: KEY=NUMBER")?;
    runtime::set(&mut Limits::default(), key, value).map_err(|error| format!("{error:#}"))?;
    Ok((key.to_owned(), value.to_owned()))
}

fn host_and_port(text: &str) -> anyhow::Result<(String, u16)> {
    let parsed = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
    match parsed {
        Some((host, port)) if !host.is_empty() => {
            Ok((host.trim_start_matches('[').trim_end_matches(']').to_owned(), port))
        }
        _ => {
            bail!("--discovery {text:?} must be of the form HOST:PORT, such as istiod.istio-system.svc:15012")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_may_be_set_on_the_command_line() {
        let key = "skysail.overload.late_ms";
        assert_eq!(setting(&format!("{key}=50")), Ok((key.to_owned(), "50".to_owned())));
        let refused = |text: &str| setting(text).unwrap_err();
        assert!(refused(key).contains("KEY=NUMBER"));
        assert!(refused(&format!("{key}=fast")).contains("\"fast\" is not a whole number"));
        assert!(refused("skysail.overload.latest_ms=1").contains("there is no skysail.overload.latest_ms"));
    }
}
