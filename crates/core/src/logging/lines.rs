//! Log lines on their way to standard error.
//!
//! Standard error often is a pipe, and a write to a pipe blocks while its reader does not read. A thread of its own
//! therefore writes, from a bounded buffer: whoever logs never waits. Lines that do not fit are lost and counted, and
//! the log says so when there is room again. A reader that has gone costs the lines alone.

use std::{
    io::{self, Write},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

/// Most bytes that wait to be written.
const MAX_WAITING: usize = 1 << 20;
/// How long the end of the program waits for the last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

/// A bounded buffer of lines.
#[derive(Debug)]
pub(super) struct Lines {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    waiting: Vec<u8>,
    /// A thread writes what waits; else everybody writes for himself.
    started: bool,
    /// The thread has taken lines and not written them yet.
    writing: bool,
    /// Lines lost since the start.
    lost: u64,
    /// Lines lost that the log has not reported yet.
    unreported: u64,
}

/// The lines of this process.
pub(super) static LINES: Lines = Lines::new();

/// Writes the lines that are left when it is dropped; to be kept until the program ends.
#[derive(Debug)]
#[must_use = "the last lines are lost unless this is kept until the end"]
pub struct Flush(());

impl Drop for Flush {
    fn drop(&mut self) {
        LINES.flush(LAST_LINES);
    }
}

/// One line.
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

/// Starts the thread that writes, unless it has been started.
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
        let state = State { waiting: Vec::new(), started: false, writing: false, lost: 0, unreported: 0 };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics halfway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many lines were lost.
    pub(super) fn lost(&self) -> u64 {
        self.lock().lost
    }

    fn push(&self, line: &[u8]) {
        let mut state = self.lock();
        if !state.started {
            drop(state);
            let _ = io::stderr().write_all(line);
        } else if state.waiting.len() + line.len() > MAX_WAITING {
            state.lost += 1;
            state.unreported += 1;
        } else {
            state.waiting.extend_from_slice(line);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Writes what comes, for ever.
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
                writeln!(to, "{unreported} log lines were lost: standard error is not read fast enough");
        }
        let mut state = self.lock();
        if written.is_err() {
            state.lost += batch.iter().filter(|byte| **byte == b'\n').count() as u64;
        }
        state.writing = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until all lines are written, at most so long.
    fn flush(&self, limit: Duration) {
        let left = |state: &mut State| state.started && (state.writing || !state.waiting.is_empty());
        let _ = self.changed.wait_timeout_while(self.lock(), limit, left);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A reader that takes what is written only when it is let.
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
    fn nobody_waits_for_a_reader_and_what_is_lost_is_reported() {
        let lines = started();
        let line = vec![b'x'; MAX_WAITING / 4];
        (0..6).for_each(|_| lines.push(&line));
        assert_eq!(lines.lost(), 2);
        let (sender, receiver) = mpsc::channel();
        let mut slow = Slow(receiver, Vec::new());
        (0..8).for_each(|_| sender.send(()).unwrap());
        lines.write_waiting(&mut slow);
        let text = String::from_utf8(slow.1).unwrap();
        assert!(text.ends_with("x2 log lines were lost: standard error is not read fast enough\n"));
        lines.flush(Duration::MAX);
    }

    #[test]
    fn lines_that_nobody_reads_any_more_are_counted() {
        let lines = started();
        lines.push(b"a\nb\n");
        let (_, receiver) = mpsc::channel();
        lines.write_waiting(&mut Slow(receiver, Vec::new()));
        assert_eq!(lines.lost(), 2);
    }
}
