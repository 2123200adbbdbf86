//! The command line: as typed in ([`Args`]) and as used ([`Mode`]).

use std::{num::NonZeroUsize, path::PathBuf, thread::available_parallelism};

use anyhow::bail;

use crate::{
    admin::CommandLine,
    discovery::secrets::Mesh,
    overload::Limits,
    translate::bootstrap::{Source, convert::Conversion, runtime},
};

/// How to run the sidecar: from an Envoy bootstrap file, or as the sidecar of a mesh.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Envoy bootstrap file, YAML or JSON.
    #[arg(long, short = 'c', alias = "config-path", value_name = "FILE", conflicts_with = "discovery")]
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

    #[command(flatten)]
    envoys: EnvoysArgs,

    /// Convert standard input to standard output and end: how the sidecar uses Envoy's descriptors without
    /// carrying them.
    #[arg(long, value_name = "FORM", hide = true, exclusive = true)]
    convert: Option<Conversion>,
}

/// What Envoy's command line has besides, so that what starts Envoy, such as Istio's agent, can start us in its place.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "As for Envoy")]
struct EnvoysArgs {
    /// Bootstrap in YAML or JSON, merged into that of the file.
    #[arg(long, value_name = "TEXT", requires = "bootstrap")]
    config_yaml: Option<String>,

    /// What is logged, unless SKYSAIL_LOG says so: trace, debug, info, warning, error, critical or off.
    #[arg(long, short = 'l', value_name = "LEVEL")]
    log_level: Option<String>,

    /// Seconds that /drain_listeners?graceful leaves connections.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    drain_time_s: u64,

    /// Warn about fields of a bootstrap file that are known but not supported, instead of refusing them.
    #[arg(long, requires = "bootstrap")]
    allow_unknown_static_fields: bool,

    /// Levels of Envoy's own loggers; of no effect here.
    #[arg(long, value_name = "LEVELS", hide = true)]
    component_log_level: Option<String>,

    /// Of no effect: clients are always told at once.
    #[arg(long, value_name = "STRATEGY", value_parser = ["gradual", "immediate"], hide = true)]
    drain_strategy: Option<String>,

    /// Of no effect.
    #[arg(long, value_name = "VERSION", value_parser = ["v4", "v6"], hide = true)]
    local_address_ip_version: Option<String>,

    /// Of no effect: access logs are written every 100 ms.
    #[arg(long, value_name = "MILLISECONDS", hide = true)]
    file_flush_interval_msec: Option<u64>,

    /// Of no effect: access logs are written every 100 ms.
    #[arg(long, value_name = "KB", hide = true)]
    file_flush_min_size_kb: Option<u64>,

    /// Of no effect: there is no hot restart.
    #[arg(long, hide = true)]
    disable_hot_restart: bool,

    /// Of no effect.
    #[arg(long, hide = true)]
    skip_deprecated_logs: bool,

    /// Of no effect.
    #[arg(long, hide = true)]
    enable_core_dump: bool,
}

/// What is to be done.
pub(crate) enum Mode {
    Convert(Conversion),
    Bootstrap(Source, Common),
    Mesh(Mesh, Common),
    /// Run this Envoy in the sidecar's place.
    Envoy(PathBuf, Mesh, Common),
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
    /// For the admin page.
    pub(crate) admin: CommandLine,
}

impl Args {
    /// What is logged from the start, if the command line says so.
    pub(crate) fn log_level(&self) -> Option<&str> {
        self.envoys.log_level.as_deref()
    }

    /// Checks what only makes sense together.
    pub(crate) fn mode(self) -> anyhow::Result<Mode> {
        if let Some(conversion) = self.convert {
            return Ok(Mode::Convert(conversion));
        }
        let envoys = self.envoys;
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
            admin: CommandLine {
                drain_time: std::time::Duration::from_secs(envoys.drain_time_s),
                config_path: self
                    .bootstrap
                    .as_ref()
                    .map(|path| path.display().to_string())
                    .unwrap_or_default(),
                config_yaml: envoys.config_yaml.clone().unwrap_or_default(),
                lenient: envoys.allow_unknown_static_fields,
            },
        };
        match (self.bootstrap, self.discovery, self.ca_root, self.token, self.node) {
            (Some(path), ..) => {
                let source =
                    Source { path, merged: envoys.config_yaml, lenient: envoys.allow_unknown_static_fields };
                Ok(Mode::Bootstrap(source, common))
            }
            (None, Some(discovery), Some(ca_root), Some(token), Some(node)) => {
                let (host, port) = host_and_port(&discovery)?;
                let mesh = Mesh { host, port, ca_root, token, node };
                Ok(match self.envoy {
                    Some(program) => Mode::Envoy(program, mesh, common),
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
