//! The thread that writes the audit log.

use std::{
    fs::{File, OpenOptions},
    io::{self, Stdout, Write},
    mem,
    os::unix::fs::OpenOptionsExt as _,
    sync::{Arc, atomic::Ordering},
};

use serde::Serialize;
use tokio::sync::{mpsc::Receiver, oneshot};
use tracing::{error, info};

use super::{Target, line};
use crate::metrics::{Metrics, count};

/// Maximum number of messages per batch; one `fdatasync` makes a batch durable.
const BATCH: usize = 256;

/// A message to the thread.
pub(super) enum Message {
    Record(Vec<u8>),
    /// A record whose sender waits until it is on disk.
    Confirmed(Vec<u8>, oneshot::Sender<bool>),
    /// Reports drops, and then to the sender that all earlier messages are processed.
    Flush(oneshot::Sender<()>),
    Reopen,
}

/// Result of writing a record, and the sender that waits until it is on disk.
type Written = (Result<(), String>, Option<oneshot::Sender<bool>>);

/// An open destination.
trait Output: Write + Send {
    /// Waits until written lines are on disk.
    fn sync(&self) -> io::Result<()>;
}

impl Output for File {
    fn sync(&self) -> io::Result<()> {
        match self.sync_data() {
            // Pipes and devices do not support `fdatasync`.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
            synced => synced,
        }
    }
}

impl Output for Stdout {
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

fn open(target: &Target) -> io::Result<Box<dyn Output>> {
    Ok(match target {
        Target::Stdout => Box::new(io::stdout()),
        Target::File(path) => Box::new(OpenOptions::new().append(true).create(true).mode(0o600).open(path)?),
    })
}

/// The destination of the log and its state.
pub(super) struct Sink {
    target: Target,
    output: Box<dyn Output>,
    /// The last write may have left an incomplete line.
    has_partial_line: bool,
    /// Last logged error, while writes fail.
    last_error: Option<String>,
    /// Number of dropped records that the log has reported.
    reported_drops: u64,
    metrics: Arc<Metrics>,
}

/// Record of the number of dropped records.
#[derive(Serialize)]
struct Dropped {
    event: &'static str,
    records: u64,
}

impl Sink {
    pub(super) fn open(target: Target, metrics: Arc<Metrics>) -> io::Result<Self> {
        let output = open(&target)?;
        Ok(Self { target, output, has_partial_line: false, last_error: None, reported_drops: 0, metrics })
    }

    /// Opens the file by its name. On failure the old file stays in use.
    fn reopen(&mut self) {
        match open(&self.target) {
            Ok(output) => {
                self.output = output;
                self.has_partial_line = false;
                info!("audit log reopened");
            }
            Err(error) => error!(%error, "audit log cannot be reopened; the old file stays in use"),
        }
    }

    /// Writes until all senders are dropped.
    pub(super) fn run(mut self, mut records: Receiver<Message>) {
        let mut batch = Vec::with_capacity(BATCH);
        while records.blocking_recv_many(&mut batch, BATCH) > 0 {
            self.take(batch.drain(..));
        }
    }

    fn take(&mut self, batch: impl IntoIterator<Item = Message>) {
        let mut written: Vec<Written> = Vec::new();
        for message in batch {
            match message {
                Message::Record(line) => written.push((self.write(&line), None)),
                Message::Confirmed(line, confirm) => written.push((self.write(&line), Some(confirm))),
                Message::Flush(flushed) => {
                    self.finish(mem::take(&mut written));
                    if let Err(error) = self.report_drops() {
                        self.log_result(Err(error.to_string()));
                    }
                    let _ = flushed.send(());
                }
                Message::Reopen => {
                    // The records before this message are in the old file.
                    self.finish(mem::take(&mut written));
                    self.reopen();
                }
            }
        }
        self.finish(written);
    }

    /// Puts records on disk if a sender waits for one of them. Then counts and reports the results.
    fn finish(&mut self, written: Vec<Written>) {
        let is_awaited = written.iter().any(|(_, confirm)| confirm.is_some());
        let synced = if is_awaited { self.output.sync() } else { Ok(()) };
        let synced = synced.map_err(|error| error.to_string());
        for (result, confirm) in written {
            let result = result.and_then(|()| synced.clone());
            count(if result.is_ok() { &self.metrics.audit_written } else { &self.metrics.audit_failed });
            if let Some(confirm) = confirm {
                let _ = confirm.send(result.is_ok());
            }
            self.log_result(result);
        }
    }

    /// Writes a line, after a record of drops if there were any.
    fn write(&mut self, text: &[u8]) -> Result<(), String> {
        self.report_drops().and_then(|()| self.put(text)).map_err(|error| error.to_string())
    }

    /// Writes a record of the drops since the last one, if there were any.
    fn report_drops(&mut self) -> io::Result<()> {
        let dropped = self.metrics.audit_dropped.load(Ordering::Relaxed);
        if dropped > self.reported_drops {
            let missing = line(&Dropped { event: "audit.dropped", records: dropped - self.reported_drops });
            self.put(&missing)?;
            self.reported_drops = dropped;
        }
        Ok(())
    }

    fn put(&mut self, text: &[u8]) -> io::Result<()> {
        if self.has_partial_line {
            self.output.write_all(b"\n")?;
            self.has_partial_line = false;
        }
        let mut rest = text;
        while !rest.is_empty() {
            match self.output.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.has_partial_line = rest.len() < text.len();
                    return Err(error);
                }
            }
        }
        self.output.flush()
    }

    /// Logs the first of equal failures, and the recovery.
    fn log_result(&mut self, result: Result<(), String>) {
        match result {
            Ok(()) => {
                if self.last_error.take().is_some() {
                    info!("audit log can be written again");
                }
            }
            Err(last_error) => {
                if self.last_error.as_ref() != Some(&last_error) {
                    error!(error = last_error, "audit log cannot be written; records are lost");
                    self.last_error = Some(last_error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn lines_are_complete_and_drops_are_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let metrics = Arc::<Metrics>::default();
        let mut sink = Sink::open(Target::File(path.clone()), Arc::clone(&metrics)).unwrap();
        sink.take(vec![Message::Record(b"1\n".to_vec())]);
        metrics.audit_dropped.fetch_add(7, Ordering::Relaxed);
        fs::write(&path, "1\nto").unwrap();
        sink.has_partial_line = true;
        sink.take(vec![Message::Record(b"2\n".to_vec()), Message::Record(b"3\n".to_vec())]);
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines[0], lines[1], lines[3], lines[4], lines.len()), ("1", "to", "2", "3", 5), "{text}");
        assert!(lines[2].contains("\"event\":\"audit.dropped\",\"records\":7"), "{text}");

        fs::rename(&path, folder.path().join("audit.log.1")).unwrap();
        sink.take(vec![Message::Reopen, Message::Record(b"4\n".to_vec())]);
        assert_eq!(fs::read_to_string(&path).unwrap(), "4\n");

        metrics.audit_dropped.fetch_add(1, Ordering::Relaxed);
        let (flush, mut flushed) = oneshot::channel();
        sink.take(vec![Message::Flush(flush)]);
        assert_eq!(flushed.try_recv(), Ok(()));
        assert!(fs::read_to_string(&path).unwrap().ends_with("\"records\":1}\n"));
    }

    /// A file on a disk that fails.
    struct FailingDisk;

    impl Write for FailingDisk {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Output for FailingDisk {
        fn sync(&self) -> io::Result<()> {
            Err(io::Error::other("disk failed"))
        }
    }

    #[test]
    fn a_record_is_confirmed_only_if_the_file_that_has_it_is_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let target = Target::File(folder.path().join("audit.log"));
        let mut sink = Sink::open(target, Arc::default()).unwrap();
        sink.output = Box::new(FailingDisk);
        let ((old, mut in_old), (new, mut in_new)) = (oneshot::channel(), oneshot::channel());
        sink.take(vec![
            Message::Confirmed(b"1\n".to_vec(), old),
            Message::Reopen,
            Message::Confirmed(b"2\n".to_vec(), new),
        ]);
        assert_eq!((in_old.try_recv(), in_new.try_recv()), (Ok(false), Ok(true)));
    }

    #[test]
    fn records_count_as_written_only_if_their_sync_succeeds() {
        let metrics = Arc::<Metrics>::default();
        let mut sink = Sink::open(Target::File("/dev/null".into()), Arc::clone(&metrics)).unwrap();
        let counts =
            || [&metrics.audit_written, &metrics.audit_failed].map(|count| count.load(Ordering::Relaxed));
        let confirmed = || Message::Confirmed(b"1\n".to_vec(), oneshot::channel().0);
        sink.take(vec![confirmed()]);
        assert_eq!(counts(), [1, 0]);
        sink.output = Box::new(FailingDisk);
        sink.take(vec![Message::Record(b"2\n".to_vec()), confirmed()]);
        assert_eq!(counts(), [1, 2]);
    }

    #[test]
    fn a_failed_reopening_is_no_failed_write() {
        let folder = tempfile::tempdir().unwrap();
        let (before, after) = (folder.path().join("before"), folder.path().join("after"));
        fs::create_dir(&before).unwrap();
        let mut sink = Sink::open(Target::File(before.join("audit.log")), Arc::default()).unwrap();
        fs::rename(&before, &after).unwrap();
        sink.take(vec![Message::Record(b"1\n".to_vec()), Message::Reopen]);
        assert_eq!(sink.last_error, None);
        sink.take(vec![Message::Record(b"2\n".to_vec())]);
        assert_eq!(fs::read_to_string(after.join("audit.log")).unwrap(), "1\n2\n");
    }

    #[test]
    fn a_failed_write_is_not_confirmed() {
        let metrics = Arc::<Metrics>::default();
        let mut sink = Sink::open(Target::File("/dev/full".into()), Arc::clone(&metrics)).unwrap();
        let (confirm, mut confirmed) = oneshot::channel();
        sink.take(vec![Message::Confirmed(b"1\n".to_vec(), confirm)]);
        assert_eq!(confirmed.try_recv(), Ok(false));
        assert_eq!(metrics.audit_failed.load(Ordering::Relaxed), 1);
    }
}
