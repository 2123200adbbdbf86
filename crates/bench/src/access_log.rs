//! Access logs under measurement: where a sidecar writes its entries, the collector beside it, and their number.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::child::{Running, Scheduling, Streams};

/// Time for the entries to arrive after the load. Envoy and skysail send what they have at least once a second.
const TIMEOUT: Duration = Duration::from_secs(15);
/// Interval between two looks at the file of entries.
const INTERVAL: Duration = Duration::from_millis(50);
/// Istio's default text format.
const FORMAT: &str = concat!(
    "[%START_TIME%] \"%REQ(:METHOD)% %REQ(X-ENVOY-ORIGINAL-PATH?:PATH)% %PROTOCOL%\" %RESPONSE_CODE% ",
    "%RESPONSE_FLAGS% %RESPONSE_CODE_DETAILS% %CONNECTION_TERMINATION_DETAILS% ",
    "\"%UPSTREAM_TRANSPORT_FAILURE_REASON%\" %BYTES_RECEIVED% %BYTES_SENT% %DURATION% ",
    "%RESP(X-ENVOY-UPSTREAM-SERVICE-TIME)% \"%REQ(X-FORWARDED-FOR)%\" \"%REQ(USER-AGENT)%\" ",
    "\"%REQ(X-REQUEST-ID)%\" \"%REQ(:AUTHORITY)%\" \"%UPSTREAM_HOST%\" %UPSTREAM_CLUSTER_RAW% ",
    "%UPSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_LOCAL_ADDRESS% %DOWNSTREAM_REMOTE_ADDRESS% ",
    "%REQUESTED_SERVER_NAME% %ROUTE_NAME%\n",
);

/// Access log of each sidecar of a turn.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AccessLog {
    /// No access log.
    #[default]
    None,
    /// Lines in a file that nothing reads.
    File,
    /// Lines on standard output, a pipe that a collector reads.
    Stdout,
    /// OpenTelemetry log records over gRPC to a collector.
    Otlp,
}

impl AccessLog {
    pub(crate) const ALL: [Self; 4] = [Self::None, Self::File, Self::Stdout, Self::Otlp];

    /// Returns the name in scenarios and result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::File => "file",
            Self::Stdout => "stdout",
            Self::Otlp => "otlp",
        }
    }

    /// Returns a text followed by the name, as in `envoy, stdout`; the text alone without an access log.
    pub(crate) fn after(self, text: &str) -> String {
        if self.is_none() { text.to_owned() } else { format!("{text}, {}", self.name()) }
    }

    /// Returns true if there is none; for serialization.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(crate) fn is_none(&self) -> bool {
        *self == Self::None
    }
}

/// Returns the access logs of a run without access logs.
pub(crate) fn only_none() -> Vec<AccessLog> {
    vec![AccessLog::None]
}

/// Returns true if a run has no access logs.
pub(crate) fn is_only_none(logs: &[AccessLog]) -> bool {
    logs == [AccessLog::None]
}

/// Destination of a sidecar's entries, in its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    /// A file, or `/dev/stdout`.
    Path(PathBuf),
    /// An OpenTelemetry collector on this port of the loopback.
    Otlp(u16),
}

impl Destination {
    /// Returns Envoy's configuration of the access log. The cluster of a collector is `collector`.
    pub(crate) fn configuration(&self) -> Value {
        match self {
            Self::Path(path) => json!({
                "name": "envoy.access_loggers.file",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                    "path": path,
                    "log_format": { "text_format_source": { "inline_string": FORMAT } },
                },
            }),
            Self::Otlp(_) => json!({
                "name": "envoy.access_loggers.open_telemetry",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.access_loggers.open_telemetry.v3.OpenTelemetryAccessLogConfig",
                    "common_config": {
                        "log_name": "otel_envoy_accesslog",
                        "transport_api_version": "V3",
                        "grpc_service": { "envoy_grpc": { "cluster_name": "collector" } },
                    },
                    "disable_builtin_labels": true,
                    "body": { "string_value": FORMAT },
                },
            }),
        }
    }
}

/// What [`SidecarLog::start`] has prepared for a sidecar; nothing without an access log.
#[derive(Default)]
pub(crate) struct StartedLog {
    pub(crate) log: Option<SidecarLog>,
    /// The sidecar's standard output, if it is not its log.
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) collector: Option<Running>,
}

/// Access log of one sidecar.
pub(crate) struct SidecarLog {
    /// Name of the sidecar.
    sidecar: String,
    destination: Destination,
    entries: LineCounter,
}

impl SidecarLog {
    /// Prepares the access log of a sidecar, and starts its collector. `port` is free.
    pub(crate) async fn start(
        log: AccessLog,
        sidecar: &str,
        port: u16,
        (executable, folder): (&Path, &Path),
        scheduling: Scheduling,
    ) -> anyhow::Result<StartedLog> {
        if log.is_none() {
            return Ok(StartedLog::default());
        }
        let file = folder.join(format!("{sidecar}-access.log"));
        // Empty: the turns of a run have one folder.
        let entries = LineCounter::create(&file)?;
        let mut command: Vec<OsString> = vec![executable.into(), "bench".into(), "collect".into()];
        command.extend(["--output".into(), file.clone().into_os_string()]);
        let name = sidecar.replace("-proxy", "-collector");
        let (mut stdout, mut collector) = (None, None);
        let destination = match log {
            AccessLog::None | AccessLog::File => Destination::Path(file),
            AccessLog::Stdout => {
                let (reader, writer) = io::pipe().context("cannot create a pipe")?;
                let streams = Streams { stdin: Some(reader.into()), stdout: None };
                collector = Some(Running::start_with(&name, &command, folder, scheduling, streams)?);
                stdout = Some(writer.into());
                Destination::Path("/dev/stdout".into())
            }
            AccessLog::Otlp => {
                command.extend(["--otlp".into(), format!("127.0.0.1:{port}").into()]);
                let mut started = Running::start(&name, &command, folder, scheduling)?;
                started.ready(port).await?;
                collector = Some(started);
                Destination::Otlp(port)
            }
        };
        let log = Self { sidecar: sidecar.to_owned(), destination, entries };
        Ok(StartedLog { log: Some(log), stdout, collector })
    }

    /// Returns the destination of the entries.
    pub(crate) fn destination(&self) -> Destination {
        self.destination.clone()
    }

    /// Waits for this number of entries at least. Returns the sidecar and the number so far.
    ///
    /// # Errors
    /// Entries are missing after some time.
    pub(crate) async fn wait_for(&mut self, needed: u64) -> anyhow::Result<(String, u64)> {
        let deadline = tokio::time::Instant::now() + TIMEOUT;
        loop {
            let count = self.entries.count()?;
            if count >= needed {
                return Ok((self.sidecar.clone(), count));
            }
            ensure!(
                tokio::time::Instant::now() < deadline,
                "the access log of {} has {count} entries {TIMEOUT:?} after {needed} requests; without all entries, their \
                 cost is unknown",
                self.sidecar
            );
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

/// Counts the lines of a growing file.
struct LineCounter {
    file: File,
    lines: u64,
}

impl LineCounter {
    /// Creates an empty file.
    fn create(path: &Path) -> anyhow::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
        Ok(Self { file: file.with_context(|| format!("cannot create {}", path.display()))?, lines: 0 })
    }

    /// Returns the number of lines so far.
    fn count(&mut self) -> io::Result<u64> {
        let mut buffer = vec![0; 256 << 10];
        loop {
            let size = self.file.read(&mut buffer)?;
            if size == 0 {
                return Ok(self.lines);
            }
            self.lines += memchr::memchr_iter(b'\n', &buffer[..size]).count() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn lines_are_counted_while_the_file_grows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.log");
        let mut counter = LineCounter::create(&path).unwrap();
        assert_eq!(counter.count().unwrap(), 0);
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"a\nb\nc").unwrap();
        assert_eq!(counter.count().unwrap(), 2);
        file.write_all(b"\n").unwrap();
        assert_eq!(counter.count().unwrap(), 3);
        assert_eq!(LineCounter::create(&path).unwrap().count().unwrap(), 0);
    }
}
