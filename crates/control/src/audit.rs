//! The audit log: security events, one JSON object per line, in a file of its own. `docs/scripting.md` lists the
//! fields.
//!
//! A bounded queue passes records to a thread, so that no task waits for the disk. When the queue is full, the record
//! is dropped and counted; before the next record or at the shutdown, the thread writes the number of missing ones. With
//! `--audit-required`, a certificate is issued only after its record is on disk.

mod sink;

use std::{
    io,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, SystemTime},
};

use serde::{Serialize, Serializer};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{
        mpsc::{Sender, channel},
        oneshot,
    },
    time::timeout,
};
use tracing::warn;

use self::sink::{Message, Sink};
use crate::{
    authority::AuthorityStatus,
    metrics::{Metrics, count},
    rate_limit::{Rate, TokenBucket},
};

/// Maximum number of records in the queue.
const QUEUE_LENGTH: usize = 8_192;
/// Maximum length of a text from a client in bytes; a longer text is truncated.
const MAX_TEXT: usize = 512;
/// Timeout for a record to reach the disk, if a certificate depends on it or at the shutdown.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Destination of the records: `-` or a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Standard output.
    Stdout,
    /// A file, to which records are appended.
    File(PathBuf),
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stdout => f.write_str("-"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

impl From<&str> for Target {
    fn from(text: &str) -> Self {
        if text == "-" { Self::Stdout } else { Self::File(text.into()) }
    }
}

/// A security event.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event")]
pub(crate) enum AuditEvent<'a> {
    #[serde(rename = "certificate.issued")]
    CertificateIssued {
        identity: ExternalText<'a>,
        serial: &'a str,
        key_sha256: &'a str,
        #[serde(serialize_with = "seconds")]
        not_before: SystemTime,
        #[serde(serialize_with = "seconds")]
        not_after: SystemTime,
        address: ExternalText<'a>,
        /// `token` or `certificate`.
        authentication: &'static str,
    },
    #[serde(rename = "certificate.refused")]
    CertificateRefused { address: ExternalText<'a>, reason: ExternalText<'a>, suppressed: u64 },
    #[serde(rename = "discovery.refused")]
    DiscoveryRefused {
        address: ExternalText<'a>,
        proxy: ExternalText<'a>,
        reason: ExternalText<'a>,
        suppressed: u64,
    },
    #[serde(rename = "configuration.loaded")]
    ConfigurationLoaded { files: usize, changes: usize },
    #[serde(rename = "configuration.changed")]
    ConfigurationChanged {
        file: ExternalText<'a>,
        object: ExternalText<'a>,
        /// `applied` or `deleted`.
        action: &'static str,
    },
    #[serde(rename = "authority.changed")]
    AuthorityChanged { authority: &'a AuthorityStatus },
    #[serde(rename = "tokens.changed")]
    TokensChanged { files: &'a [String] },
    #[serde(rename = "admin.action")]
    AdminAction { address: ExternalText<'a>, page: ExternalText<'a>, status: u16 },
    #[serde(rename = "admin.read")]
    AdminRead { address: ExternalText<'a>, identity: ExternalText<'a>, page: ExternalText<'a> },
    #[serde(rename = "admin.refused")]
    AdminRefused {
        address: ExternalText<'a>,
        page: ExternalText<'a>,
        reason: ExternalText<'a>,
        suppressed: u64,
    },
}

impl AuditEvent<'_> {
    /// Returns the index of a refusal's token bucket, and its field for the number of suppressed events.
    fn rate_limited(&mut self) -> Option<(usize, &mut u64)> {
        match self {
            Self::CertificateRefused { suppressed, .. } => Some((0, suppressed)),
            Self::DiscoveryRefused { suppressed, .. } => Some((1, suppressed)),
            Self::AdminRefused { suppressed, .. } => Some((2, suppressed)),
            _ => None,
        }
    }
}

/// A text that may come from a client: truncated to [`MAX_TEXT`] and escaped as JSON.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExternalText<'a>(pub(crate) &'a str);

impl Serialize for ExternalText<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self(text) = self;
        if text.len() <= MAX_TEXT {
            return to.serialize_str(text);
        }
        to.collect_str(&format_args!("{}…", &text[..text.floor_char_boundary(MAX_TEXT)]))
    }
}

fn seconds<S: Serializer>(time: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    to.serialize_u64(since.as_secs())
}

/// A line of the log. Times are in seconds since 1970.
#[derive(Serialize)]
struct Record<'a, E> {
    time: f64,
    #[serde(flatten)]
    event: &'a E,
}

/// Returns the line of an event.
fn line(event: &impl Serialize) -> Vec<u8> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let time = now.as_millis() as f64 / 1e3;
    // Cannot fail: all map keys are strings.
    let mut line = serde_json::to_vec(&Record { time, event }).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Rate limit of refusals, so that clients cannot fill the disk.
const REFUSAL_RATE: Rate = Rate { burst: 100.0, per_second: 10.0 };

fn refusal_buckets() -> [Mutex<TokenBucket>; 3] {
    std::array::from_fn(|_| Mutex::new(TokenBucket::new(REFUSAL_RATE)))
}

/// Records security events.
pub(crate) struct AuditLog {
    /// `None` without an audit log.
    queue: Option<Sender<Message>>,
    /// A certificate is issued only after its record is on disk.
    required: bool,
    refusals: [Mutex<TokenBucket>; 3],
    metrics: Arc<Metrics>,
}

impl AuditLog {
    /// Opens the log and starts its thread.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub(crate) fn open(target: &Target, required: bool, metrics: Arc<Metrics>) -> io::Result<Self> {
        let refusals = refusal_buckets();
        let sink = Sink::open(target.clone(), Arc::clone(&metrics))?;
        let (queue, records) = channel(QUEUE_LENGTH);
        thread::Builder::new().name("audit".to_owned()).spawn(move || sink.run(records))?;
        Ok(Self { queue: Some(queue), required, refusals, metrics })
    }

    /// Reopens the file at each SIGHUP, after a log rotation has moved it.
    ///
    /// # Errors
    /// When the signal handler cannot be installed.
    pub(crate) fn reopen_on_hangup(self: &Arc<Self>) -> io::Result<()> {
        let Some(queue) = self.queue.clone() else { return Ok(()) };
        let mut hangup = signal(SignalKind::hangup())?;
        tokio::spawn(async move {
            while hangup.recv().await.is_some() {
                let _ = queue.send(Message::Reopen).await;
            }
        });
        Ok(())
    }

    /// Returns a log that records nothing.
    pub(crate) fn none() -> Arc<Self> {
        let (refusals, metrics) = (refusal_buckets(), Arc::default());
        Arc::new(Self { queue: None, required: false, refusals, metrics })
    }

    /// Records an event. Drops it if the queue is full; suppresses a refusal above its rate limit.
    pub(crate) fn record(&self, mut event: AuditEvent<'_>) {
        let Some(queue) = &self.queue else { return };
        if let Some((bucket, suppressed)) = event.rate_limited() {
            let bucket = self.refusals[bucket].lock();
            match bucket.unwrap_or_else(PoisonError::into_inner).take(std::time::Instant::now()) {
                Some(before) => *suppressed = before,
                None => return,
            }
        }
        if queue.try_send(Message::Record(line(&event))).is_err() {
            count(&self.metrics.audit_dropped);
        }
    }

    /// Records an event before its effect. Returns false if the effect must not happen: with `--audit-required`, when
    /// the record is not on disk within [`WRITE_TIMEOUT`].
    pub(crate) async fn confirm(&self, event: AuditEvent<'_>) -> bool {
        let Some(queue) = self.queue.as_ref().filter(|_| self.required) else {
            self.record(event);
            return true;
        };
        let (written, confirmed) = oneshot::channel();
        if queue.try_send(Message::Confirmed(line(&event), written)).is_err() {
            count(&self.metrics.audit_dropped);
            return false;
        }
        matches!(timeout(WRITE_TIMEOUT, confirmed).await, Ok(Ok(true)))
    }

    /// Waits until all queued records are written or have failed, at most [`WRITE_TIMEOUT`].
    pub(crate) async fn flush(&self) {
        let Some(queue) = &self.queue else { return };
        let (written, flushed) = oneshot::channel();
        let flush = async { queue.send(Message::Flush(written)).await.is_ok() && flushed.await.is_ok() };
        if !timeout(WRITE_TIMEOUT, flush).await.unwrap_or(false) {
            warn!("audit log did not take all records within {WRITE_TIMEOUT:?}; the last ones are lost");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, future::ready};

    use serde_json::{Value, json};

    use super::*;

    fn read(event: &AuditEvent<'_>) -> Value {
        let mut value: Value = serde_json::from_slice(&line(event)).unwrap();
        assert!(value["time"].as_f64().unwrap() > 1.7e9);
        value.as_object_mut().unwrap().remove("time");
        value
    }

    #[test]
    fn a_record_is_one_line_for_any_text() {
        let long = "é".repeat(MAX_TEXT);
        let event = AuditEvent::DiscoveryRefused {
            address: ExternalText("10.0.0.1:1"),
            proxy: ExternalText("a\n{\"event\":\"certificate.issued\"}\r\u{1b}[2J\0\u{2028}"),
            reason: ExternalText(&long),
            suppressed: 3,
        };
        let written = line(&event);
        assert_eq!(
            written.iter().filter(|byte| byte.is_ascii_control()).count(),
            1,
            "only the line feed at the end"
        );
        assert!(written.len() < 4 * MAX_TEXT);
        let expected = json!({
            "event": "discovery.refused",
            "address": "10.0.0.1:1",
            "proxy": "a\n{\"event\":\"certificate.issued\"}\r\u{1b}[2J\0\u{2028}",
            "reason": "é".repeat(MAX_TEXT / 2) + "…",
            "suppressed": 3,
        });
        assert_eq!(read(&event), expected);
    }

    #[tokio::test]
    async fn a_flush_waits_for_room_in_the_queue() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let metrics = Arc::<Metrics>::default();
        let (queue, records) = channel(1);
        let log = AuditLog {
            queue: Some(queue),
            required: false,
            refusals: refusal_buckets(),
            metrics: Arc::clone(&metrics),
        };
        log.record(AuditEvent::TokensChanged { files: &[] });
        let mut flush = Box::pin(log.flush());
        tokio::select! {
            biased;
            () = &mut flush => panic!("the record is not written yet"),
            () = ready(()) => {}
        }
        let sink = Sink::open(Target::File(path.clone()), metrics).unwrap();
        thread::spawn(move || sink.run(records));
        flush.await;
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("tokens.changed") && text.lines().count() == 1, "{text}");
    }
}
