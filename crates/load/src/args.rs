//! The command line, with Fortio's names of flags.

use std::{fs, net::IpAddr, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};

use crate::{go, pace::PaceSettings};

/// Maximum number of streams of all connections.
const MAX_SENDERS: u64 = 100_000;

/// Settings of `skysail load`.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct LoadArgs {
    #[command(subcommand)]
    pub(crate) command: Option<crate::LoadCommand>,

    /// Target: `http://`, `https://`, `grpc://`, `grpcs://`, `tcp://` or `tls://`.
    #[arg(value_name = "URL", required = true)]
    pub(crate) url: Option<String>,

    /// Requests per second over all connections; 0 for the maximum, where each connection sends its next request when
    /// it has the response to the previous one.
    #[arg(long, value_name = "N", default_value_t = 8.0, value_parser = rate)]
    qps: f64,

    /// Number of connections. With HTTP/2, each has the streams of `-s`.
    #[arg(short = 'c', value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) connections: u32,

    /// Duration of the load; 0 for no end.
    #[arg(short = 't', value_name = "DURATION", default_value = "5s", value_parser = go::duration)]
    duration: Duration,

    /// Number of requests; replaces the duration.
    #[arg(short = 'n', value_name = "N", default_value_t = 0)]
    count: u64,

    /// Latency counts from when a request was sent. By default it counts from when the request was due.
    #[arg(long)]
    pub(crate) from_sent: bool,

    /// Send requests at random times, which deviate by up to 10 % of the interval of a connection.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, default_value_t = false, action = clap::ArgAction::Set)]
    jitter: bool,

    /// Spread the times at which connections send. Without it, all connections send at the same time, which is the
    /// default of Fortio.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, default_value_t = true, action = clap::ArgAction::Set)]
    uniform: bool,

    /// Skip requests that are overdue. Skipped requests are counted.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, default_value_t = false, action = clap::ArgAction::Set)]
    nocatchup: bool,

    /// Threads of the generator. Default: one for each CPU, at most one for each connection.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_024))]
    pub(crate) threads: Option<u32>,

    /// Percentiles to report.
    #[arg(short = 'p', value_name = "N,…", value_delimiter = ',', default_values = ["50", "75", "90", "99", "99.9"], value_parser = percentile)]
    pub(crate) percentiles: Vec<f64>,

    /// Width of the smallest bucket of the histogram in results, in seconds. Percentiles do not depend on it.
    #[arg(short = 'r', value_name = "SECONDS", default_value_t = 0.000_1, value_parser = positive)]
    pub(crate) resolution: f64,

    /// Lower bound of the buckets of the histogram.
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = go::duration)]
    pub(crate) offset: Duration,

    /// Header of the requests, as `Name: value`. May be repeated.
    #[arg(short = 'H', value_name = "HEADER")]
    pub(crate) headers: Vec<String>,

    /// Method. Default: GET, or POST with a payload.
    #[arg(short = 'X', value_name = "METHOD", value_parser = method)]
    pub(crate) method: Option<String>,

    /// Body of the requests.
    #[arg(long, value_name = "TEXT")]
    payload: Option<String>,

    /// Body of the requests, from a file.
    #[arg(long, value_name = "FILE", conflicts_with = "payload")]
    payload_file: Option<PathBuf>,

    /// Body of the requests: this number of bytes.
    #[arg(long, value_name = "BYTES", conflicts_with_all = ["payload", "payload_file"], value_parser = clap::value_parser!(u32).range(..=1_073_741_824))]
    payload_size: Option<u32>,

    /// Header `content-type` of the requests.
    #[arg(long, value_name = "TYPE")]
    pub(crate) content_type: Option<String>,

    /// Use HTTP/2: with prior knowledge in plain text, by ALPN over TLS.
    #[arg(long)]
    pub(crate) h2: bool,

    /// Use HTTP/1.0.
    #[arg(long = "http1.0", conflicts_with = "h2")]
    pub(crate) http10: bool,

    /// Call gRPC's health check, or Fortio's ping with `-ping`.
    #[arg(long)]
    pub(crate) grpc: bool,

    /// Call Fortio's ping, which echoes the payload.
    #[arg(long)]
    pub(crate) ping: bool,

    /// Name of the service in gRPC's health check.
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(crate) healthservice: String,

    /// Streams of each HTTP/2 connection.
    #[arg(short = 's', value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub(crate) streams: u32,

    /// Use a connection for more than one request. Without it, each connection is reset after its response.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", require_equals = true, default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) keepalive: bool,

    /// Number of requests after which a connection is replaced, at random between both numbers.
    #[arg(long, value_name = "MIN:MAX", value_parser = range)]
    pub(crate) connection_reuse: Option<(u32, u32)>,

    /// Timeout of a request, from when it is sent.
    #[arg(long, value_name = "DURATION", default_value = "3s", value_parser = go::duration)]
    pub(crate) timeout: Duration,

    /// Root certificates that the server's certificate is verified with.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,

    /// Certificate chain of the client, for mutual TLS.
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(crate) cert: Option<PathBuf>,

    /// Private key of the client.
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,

    /// Accept every certificate of the server.
    #[arg(short = 'k')]
    pub(crate) insecure: bool,

    /// Name of the server for SNI and the verification. Default: the host of the URL.
    #[arg(long, value_name = "NAME")]
    pub(crate) server_name: Option<String>,

    /// Connect to this address instead of the host's.
    #[arg(long, value_name = "IP")]
    pub(crate) resolve: Option<IpAddr>,

    /// Connect to this Unix socket.
    #[arg(long, value_name = "PATH", conflicts_with = "resolve")]
    pub(crate) unix_socket: Option<PathBuf>,

    /// Buffer for the head of a response, in KB.
    #[arg(long, value_name = "KB", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_024))]
    pub(crate) httpbufferkb: u32,

    /// End the load at the first response with this status; -1 for the first failure without a response.
    #[arg(long, value_name = "STATUS", allow_hyphen_values = true)]
    pub(crate) abort_on: Option<i32>,

    /// Begin even if the first request of a connection fails.
    #[arg(long)]
    pub(crate) allow_initial_errors: bool,

    /// Labels in the result. Default: the URL.
    #[arg(long, value_name = "TEXT")]
    pub(crate) labels: Option<String>,

    /// Write the result as JSON to this file; `-` for standard output, instead of the text.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Write the result as JSON to a file in `-data-dir`, with time and labels in its name.
    #[arg(short = 'a')]
    pub(crate) autosave: bool,

    /// Folder of results.
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub(crate) data_dir: PathBuf,

    /// Print no progress.
    #[arg(long)]
    pub(crate) quiet: bool,
}

impl LoadArgs {
    /// Returns the body of the requests.
    pub(crate) fn payload(&self) -> anyhow::Result<Vec<u8>> {
        Ok(match (&self.payload, &self.payload_file, self.payload_size) {
            (Some(text), ..) => text.clone().into_bytes(),
            (_, Some(file), _) => {
                fs::read(file).with_context(|| format!("cannot read {}", file.display()))?
            }
            (_, _, Some(size)) => vec![b'x'; size as usize],
            _ => Vec::new(),
        })
    }

    /// Returns the rate; `None` for the maximum.
    pub(crate) fn rate(&self) -> Option<f64> {
        (self.qps > 0.0).then_some(self.qps)
    }

    /// Returns the duration; `None` without an end, or with a number of requests.
    pub(crate) fn duration(&self) -> Option<Duration> {
        Some(self.duration).filter(|duration| !duration.is_zero() && self.count == 0)
    }

    /// Returns the number of requests; `None` without a limit.
    pub(crate) fn count(&self) -> Option<u64> {
        Some(self.count).filter(|count| *count > 0)
    }

    /// Returns the due times of `senders` connections or streams.
    pub(crate) fn pace(&self, senders: u64) -> PaceSettings {
        let end = self.duration().map_or(u64::MAX, |end| u64::try_from(end.as_nanos()).unwrap_or(u64::MAX));
        PaceSettings {
            rate: self.rate(),
            connections: senders,
            jitter: self.jitter,
            uniform: self.uniform,
            catch_up: !self.nocatchup,
            count: self.count(),
            end,
        }
    }

    /// Returns the settings that the result records: exact count, jitter, uniform, no catch-up.
    pub(crate) fn recorded(&self) -> (u64, bool, bool, bool) {
        (self.count, self.jitter, self.uniform, self.nocatchup)
    }

    /// Checks combinations of settings that the parser cannot.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.timeout.is_zero(), "-timeout must be above 0");
        let is_grpc = self.grpc
            || self
                .url
                .as_deref()
                .is_some_and(|url| url.starts_with("grpc://") || url.starts_with("grpcs://"));
        ensure!(!self.ping || is_grpc, "-ping needs -grpc, or a URL with grpc:// or grpcs://");
        let senders = u64::from(self.connections) * u64::from(self.streams);
        ensure!(senders <= MAX_SENDERS, "-c times -s is {senders}; at most {MAX_SENDERS} are possible");
        if let Some((least, most)) = self.connection_reuse {
            ensure!(least > 0 && least <= most, "-connection-reuse needs MIN:MAX with 0 < MIN ≤ MAX");
        }
        Ok(())
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        _ if text == "max" => Ok(0.0),
        // As in Fortio, a negative rate is the maximum.
        Ok(rate) if rate <= 1e9 => Ok(f64::max(rate, 0.0)),
        _ => Err("must be a number up to 1,000,000,000, or max".to_owned()),
    }
}

fn percentile(text: &str) -> Result<f64, String> {
    match text.trim().parse() {
        Ok(percentile) if percentile > 0.0 && percentile <= 100.0 => Ok(percentile),
        _ => Err("must be above 0 and at most 100".to_owned()),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (1e-9..=60.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number of seconds from 0.000000001 to 60".to_owned()),
    }
}

fn method(text: &str) -> Result<String, String> {
    http::Method::from_bytes(text.as_bytes())
        .map(|_| text.to_owned())
        .map_err(|_| "is not a method".to_owned())
}

fn range(text: &str) -> Result<(u32, u32), String> {
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    match (least.parse(), most.parse()) {
        (Ok(least), Ok(most)) => Ok((least, most)),
        _ => Err("must be MIN:MAX".to_owned()),
    }
}
