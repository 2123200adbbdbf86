//! Buffer of log lines between the program and standard error.
//!
//! Standard error often is a pipe, and a write to a pipe blocks while its reader does not read. A dedicated thread
//! therefore writes from a bounded buffer, so no caller waits. Lines that do not fit are dropped and counted, and the
//! log reports their number when there is room again. If the reader has closed the pipe, the program continues
//! and the lines are dropped.

use std::{
    io::{self, Write},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// Maximum number of bytes that wait to be written.
const MAX_WAITING: usize = 1 << 20;
/// Maximum time that the end of the program waits for the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Bounded buffer of lines.
#[derive(Debug)]
pub(super) struct Lines {
    state: Mutex<BufferState>,
    changed: Condvar,
}

#[derive(Debug)]
struct BufferState {
    waiting: Vec<u8>,
    /// The writer thread runs. Before it does, each caller writes to standard error itself.
    started: bool,
    /// The writer thread has taken lines that it has not written yet.
    writing: bool,
    /// Number of lines dropped since the start.
    dropped: u64,
    /// Number of dropped lines that the log has not reported yet.
    unreported: u64,
}

/// Lines of this process.
pub(super) static LINES: Lines = Lines::new();

/// Writes the remaining lines on drop. Keep it until the program ends.
#[derive(Debug)]
#[must_use = "the last lines are dropped unless this is kept until the end"]
pub struct Flush(());

impl Drop for Flush {
    fn drop(&mut self) {
        LINES.flush(FLUSH_TIMEOUT);
    }
}

/// Writer of one line.
pub(super) struct Line;

impl Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LINES.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts the writer thread, unless it runs already.
pub(super) fn start() -> Flush {
    let mut state = LINES.lock();
    if !state.started {
        let writer = thread::Builder::new().name("log".into()).spawn(|| LINES.run(&mut io::stderr()));
        state.started = writer.is_ok();
    }
    Flush(())
}

impl Lines {
    const fn new() -> Self {
        let state =
            BufferState { waiting: Vec::new(), started: false, writing: false, dropped: 0, unreported: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, BufferState> {
        // No code panics between two changes of the state, so a poisoned lock has a consistent state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of dropped lines.
    pub(super) fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    fn push(&self, line: &[u8]) {
        let mut state = self.lock();
        if !state.started {
            drop(state);
            let _ = io::stderr().write_all(line);
        } else if state.waiting.len() + line.len() > MAX_WAITING {
            state.dropped += 1;
            state.unreported += 1;
        } else {
            state.waiting.extend_from_slice(line);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Writes lines as they arrive; never returns.
    fn run(&self, to: &mut impl Write) {
        loop {
            self.write_waiting(to);
        }
    }

    /// Waits for lines and writes them.
    fn write_waiting(&self, to: &mut impl Write) {
        let mut state = self.lock();
        while state.waiting.is_empty() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let batch = std::mem::take(&mut state.waiting);
        let unreported = std::mem::take(&mut state.unreported);
        state.writing = true;
        drop(state);
        let mut written = to.write_all(&batch);
        if unreported > 0 && written.is_ok() {
            written =
                writeln!(to, "{unreported} log lines were dropped: standard error is not read fast enough");
        }
        let mut state = self.lock();
        if written.is_err() {
            state.dropped += batch.iter().filter(|byte| **byte == b'\n').count() as u64;
        }
        state.writing = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until all lines are written, at most for `limit`.
    fn flush(&self, limit: Duration) {
        let left = |state: &mut BufferState| state.started && (state.writing || !state.waiting.is_empty());
        let _ = self.changed.wait_timeout_while(self.lock(), limit, left);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Writer that blocks in each write until the test permits it.
    struct Slow(mpsc::Receiver<()>, Vec<u8>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.recv().map_err(|_| io::ErrorKind::BrokenPipe)?;
            self.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn started() -> Lines {
        let lines = Lines::new();
        lines.lock().started = true;
        lines
    }

    #[test]
    fn no_caller_waits_for_the_reader_and_dropped_lines_are_reported() {
        let lines = started();
        let line = vec![b'x'; MAX_WAITING / 4];
        (0..6).for_each(|_| lines.push(&line));
        assert_eq!(lines.dropped(), 2);
        let (sender, receiver) = mpsc::channel();
        let mut slow = Slow(receiver, Vec::new());
        (0..8).for_each(|_| sender.send(()).unwrap());
        lines.write_waiting(&mut slow);
        let text = String::from_utf8(slow.1).unwrap();
        assert!(text.ends_with("x2 log lines were dropped: standard error is not read fast enough\n"));
        lines.flush(Duration::MAX);
    }

    #[test]
    fn lines_written_to_a_closed_pipe_are_counted_as_dropped() {
        let lines = started();
        lines.push(b"a\nb\n");
        let (_, receiver) = mpsc::channel();
        lines.write_waiting(&mut Slow(receiver, Vec::new()));
        assert_eq!(lines.dropped(), 2);
    }
}
