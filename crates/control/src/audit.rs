//! The audit log: what security depends on, one JSON object a line, in a file of its own. `docs/scripting.md` lists the fields.
//!
//! Records go through a bounded queue to a thread, so that nobody waits for the disk. A record that finds no room is dropped and
//! counted, and the next one that is written says how many are missing. With `--audit-required` a certificate is handed out only after
//! its record is on disk.

mod sink;

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    thread,
    time::{Duration, SystemTime},
};

use serde::{Serialize, Serializer};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
    time::{sleep, timeout},
};

use self::sink::{Message, Sink};
use crate::{
    authority::Status,
    bucket::{Bucket, Rate},
    metrics::{Metrics, count},
};

/// Records that wait for the disk.
const QUEUE: usize = 8_192;
/// The longest text from outside, in bytes; longer ones are cut.
const LONGEST: usize = 512;
/// Time for a record to reach the disk where a certificate depends on it, or at the end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where records go: `-` or a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Standard output.
    Stdout,
    /// A file, which is appended to.
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

/// Event.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event")]
pub(crate) enum Event<'a> {
    #[serde(rename = "certificate.issued")]
    CertificateIssued {
        identity: Text<'a>,
        serial: &'a str,
        key_sha256: &'a str,
        #[serde(serialize_with = "seconds")]
        not_before: SystemTime,
        #[serde(serialize_with = "seconds")]
        not_after: SystemTime,
        address: Text<'a>,
        /// `token` or `certificate`.
        authentication: &'static str,
    },
    #[serde(rename = "certificate.refused")]
    CertificateRefused { address: Text<'a>, reason: Text<'a>, suppressed: u64 },
    #[serde(rename = "discovery.refused")]
    DiscoveryRefused { address: Text<'a>, proxy: Text<'a>, reason: Text<'a>, suppressed: u64 },
    #[serde(rename = "configuration.loaded")]
    ConfigurationLoaded { files: usize, changes: usize },
    #[serde(rename = "configuration.changed")]
    ConfigurationChanged {
        file: Text<'a>,
        object: Text<'a>,
        /// `applied` or `deleted`.
        action: &'static str,
    },
    #[serde(rename = "authority.changed")]
    AuthorityChanged { authority: &'a Status },
    #[serde(rename = "tokens.changed")]
    TokensChanged { files: &'a [String] },
    #[serde(rename = "admin.action")]
    AdminAction { address: Text<'a>, page: Text<'a>, status: u16 },
    #[serde(rename = "admin.read")]
    AdminRead { address: Text<'a>, identity: Text<'a>, page: Text<'a> },
    #[serde(rename = "admin.refused")]
    AdminRefused { address: Text<'a>, page: Text<'a>, reason: Text<'a>, suppressed: u64 },
}

impl Event<'_> {
    /// The bucket of a refusal, and where it says how many before it were not recorded.
    fn limited(&mut self) -> Option<(usize, &mut u64)> {
        match self {
            Self::CertificateRefused { suppressed, .. } => Some((0, suppressed)),
            Self::DiscoveryRefused { suppressed, .. } => Some((1, suppressed)),
            Self::AdminRefused { suppressed, .. } => Some((2, suppressed)),
            _ => None,
        }
    }
}

/// A text that may come from outside: cut to a length, and escaped as JSON is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text<'a>(pub(crate) &'a str);

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self(text) = self;
        if text.len() <= LONGEST {
            return to.serialize_str(text);
        }
        to.collect_str(&format_args!("{}…", &text[..text.floor_char_boundary(LONGEST)]))
    }
}

fn seconds<S: Serializer>(time: &SystemTime, to: S) -> Result<S::Ok, S::Error> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    to.serialize_u64(since.as_secs())
}

/// A line. Times are in seconds since 1970.
#[derive(Serialize)]
struct Record<'a, E> {
    time: f64,
    #[serde(flatten)]
    event: &'a E,
}

/// The line of an event.
fn line(event: &impl Serialize) -> Vec<u8> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let time = now.as_millis() as f64 / 1e3;
    // Nothing of it can fail: there are no maps with other keys than texts.
    let mut line = serde_json::to_vec(&Record { time, event }).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Records of refusals, so that callers cannot fill a disk with them.
const REFUSALS: Rate = Rate { burst: 100.0, each_second: 10.0 };

fn refusals() -> [Mutex<Bucket>; 3] {
    std::array::from_fn(|_| Mutex::new(Bucket::new(REFUSALS)))
}

/// Takes records.
pub(crate) struct Audit {
    /// None if there is no audit log.
    queue: Option<SyncSender<Message>>,
    /// Certificates need their record.
    required: bool,
    refusals: [Mutex<Bucket>; 3],
    metrics: Arc<Metrics>,
}

impl Audit {
    /// Opens the log and starts to write it.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub(crate) fn open(target: &Target, required: bool, metrics: Arc<Metrics>) -> io::Result<Self> {
        let refusals = refusals();
        let sink = Sink::open(target.clone(), Arc::clone(&metrics))?;
        let (queue, records) = sync_channel(QUEUE);
        thread::Builder::new().name("audit".to_owned()).spawn(move || sink.run(&records))?;
        Ok(Self { queue: Some(queue), required, refusals, metrics })
    }

    /// Opens the file again at each SIGHUP, so that what rotates logs may have moved it.
    ///
    /// # Errors
    /// When the signal cannot be listened to.
    pub(crate) fn reopen_on_hangup(self: &Arc<Self>) -> io::Result<()> {
        let Some(queue) = self.queue.clone() else { return Ok(()) };
        let mut hangup = signal(SignalKind::hangup())?;
        tokio::spawn(async move {
            while hangup.recv().await.is_some() {
                while let Err(TrySendError::Full(_)) = queue.try_send(Message::Reopen) {
                    sleep(Duration::from_millis(100)).await;
                }
            }
        });
        Ok(())
    }

    /// No audit log.
    pub(crate) fn none() -> Arc<Self> {
        let (refusals, metrics) = (refusals(), Arc::default());
        Arc::new(Self { queue: None, required: false, refusals, metrics })
    }

    /// Records an event, unless there is no room or too many refusals.
    pub(crate) fn record(&self, mut event: Event<'_>) {
        let Some(queue) = &self.queue else { return };
        if let Some((bucket, suppressed)) = event.limited() {
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

    /// Records an event that something depends on. False if it must not happen without: with `--audit-required`, when the record is
    /// not on disk in time.
    pub(crate) async fn confirm(&self, event: Event<'_>) -> bool {
        let Some(queue) = self.queue.as_ref().filter(|_| self.required) else {
            self.record(event);
            return true;
        };
        let (written, confirmed) = oneshot::channel();
        if queue.try_send(Message::Confirmed(line(&event), written)).is_err() {
            count(&self.metrics.audit_dropped);
            return false;
        }
        matches!(timeout(PATIENCE, confirmed).await, Ok(Ok(true)))
    }

    /// Waits until all records so far are written or have failed.
    pub(crate) async fn flush(&self) {
        let Some(queue) = &self.queue else { return };
        let (written, flushed) = oneshot::channel();
        if queue.try_send(Message::Flush(written)).is_ok() {
            let _ = timeout(PATIENCE, flushed).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(event: &Event<'_>) -> Value {
        let mut value: Value = serde_json::from_slice(&line(event)).unwrap();
        assert!(value["time"].as_f64().unwrap() > 1.7e9);
        value.as_object_mut().unwrap().remove("time");
        value
    }

    #[test]
    fn a_record_is_one_line_whatever_is_in_it() {
        let long = "é".repeat(LONGEST);
        let event = Event::DiscoveryRefused {
            address: Text("10.0.0.1:1"),
            proxy: Text("a\n{\"event\":\"certificate.issued\"}\r\u{1b}[2J\0\u{2028}"),
            reason: Text(&long),
            suppressed: 3,
        };
        let written = line(&event);
        assert_eq!(
            written.iter().filter(|byte| byte.is_ascii_control()).count(),
            1,
            "only the end of the line"
        );
        assert!(written.len() < 4 * LONGEST);
        let expected = json!({
            "event": "discovery.refused",
            "address": "10.0.0.1:1",
            "proxy": "a\n{\"event\":\"certificate.issued\"}\r\u{1b}[2J\0\u{2028}",
            "reason": "é".repeat(LONGEST / 2) + "…",
            "suppressed": 3,
        });
        assert_eq!(read(&event), expected);
    }
}
