//! Access log files: workers format lines and one thread writes them.
//!
//! Each file has a bounded buffer. Workers append to it, and the thread empties it 100 ms after the first line.
//! A worker never waits for the disk: lines that do not fit are dropped and counted.

use std::{
    cell::RefCell,
    collections::HashMap,
    fs::OpenOptions,
    io::{self, Write},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle, Thread},
    time::Duration,
};

use skysail_policy::{config::http::LogFormat, format, record::Context};

#[cfg(test)]
mod tests;

/// Maximum time that lines stay in the buffer.
const DELAY: Duration = Duration::from_millis(100);
/// Maximum size of a file's buffer, in bytes.
const MAX_BUFFERED: usize = 1 << 20;

/// Access log files of a proxy with the thread that writes them. Dropping it flushes the buffers.
#[derive(Debug)]
pub struct AccessLogger {
    shared: Arc<LogQueue>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct LogQueue {
    files: Mutex<HashMap<Box<str>, Arc<File>>>,
    dropped: AtomicU64,
    /// Lines are in a buffer.
    waiting: AtomicBool,
    ending: AtomicBool,
}

/// One log file.
#[derive(Debug, Default)]
struct File {
    lines: Mutex<Vec<u8>>,
}

/// A worker's handle to the log files.
#[derive(Debug)]
pub struct LogWriter {
    shared: Arc<LogQueue>,
    writer: Thread,
    files: RefCell<HashMap<Box<str>, Arc<File>>>,
    line: RefCell<Vec<u8>>,
}

impl AccessLogger {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system cannot create a thread.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(LogQueue::default());
        let for_thread = Arc::clone(&shared);
        let writer =
            thread::Builder::new().name("access-log".into()).spawn(move || write_lines(&for_thread))?;
        Ok(Self { shared, writer: Some(writer) })
    }

    /// Returns a handle for one worker.
    pub fn writer(&self) -> Option<LogWriter> {
        let writer = self.writer.as_ref()?.thread().clone();
        let shared = Arc::clone(&self.shared);
        Some(LogWriter { shared, writer, files: RefCell::default(), line: RefCell::default() })
    }

    /// Returns the number of dropped lines.
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }
}

impl Drop for AccessLogger {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        if let Some(writer) = self.writer.take() {
            writer.thread().unpark();
            // The thread ends without a panic, or has reported it on standard error.
            let _ = writer.join();
        }
    }
}

impl LogWriter {
    /// Logs a finished request or connection to a file.
    pub fn log(&self, path: &str, format: &LogFormat, context: &Context<'_>) {
        let mut line = self.line.borrow_mut();
        line.clear();
        match format {
            LogFormat::Text(text, empty) => format::write(text, context, empty, &mut line),
            LogFormat::Json(fields) => write_object(fields, context, &mut line),
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        if !self.file(path).append(&line) {
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        } else if !self.shared.waiting.swap(true, Ordering::AcqRel) {
            self.writer.unpark();
        }
    }

    fn file(&self, path: &str) -> Arc<File> {
        let mut files = self.files.borrow_mut();
        if let Some(file) = files.get(path) {
            return Arc::clone(file);
        }
        let file = Arc::clone(lock(&self.shared.files).entry(path.into()).or_default());
        files.insert(path.into(), Arc::clone(&file));
        file
    }
}

fn write_object(
    fields: &[(Box<str>, skysail_policy::config::http::Format)],
    context: &Context<'_>,
    line: &mut Vec<u8>,
) {
    for (index, (name, value)) in fields.iter().enumerate() {
        line.push(if index == 0 { b'{' } else { b',' });
        format::write_json_string(name.as_bytes(), line);
        line.push(b':');
        format::write_json(value, context, line);
    }
    line.extend_from_slice(if fields.is_empty() { b"{}" } else { b"}" });
}

impl File {
    /// Appends a line unless the buffer is full. The lock is held only for a copy.
    fn append(&self, line: &[u8]) -> bool {
        let mut lines = lock(&self.lines);
        let fits = lines.len() + line.len() <= MAX_BUFFERED;
        if fits {
            lines.extend_from_slice(line);
        }
        fits
    }
}

/// Destination of one log file.
#[derive(Default)]
struct Sink {
    to: Option<Box<dyn Write>>,
    failing: bool,
}

/// Main function of the thread: waits for the first line, collects lines for a while, writes them.
fn write_lines(shared: &LogQueue) {
    let mut sinks: HashMap<Box<str>, Sink> = HashMap::new();
    let mut batch = Vec::new();
    loop {
        let ending = shared.ending.load(Ordering::Acquire);
        if !ending && !shared.waiting.load(Ordering::Acquire) {
            thread::park();
            continue;
        }
        if !ending {
            thread::park_timeout(DELAY);
        }
        // Cleared before the lines are taken: a line that arrives in between is written now and signalled
        // again.
        shared.waiting.store(false, Ordering::Release);
        let files: Vec<_> =
            lock(&shared.files).iter().map(|(path, file)| (path.clone(), Arc::clone(file))).collect();
        for (path, file) in files {
            std::mem::swap(&mut *lock(&file.lines), &mut batch);
            if !batch.is_empty() {
                write_batch(&path, sinks.entry(path.clone()).or_default(), &batch, &shared.dropped);
                batch.clear();
            }
        }
        if ending {
            return;
        }
    }
}

/// Writes lines to a file; opens it first if necessary. After a failure, the lines are counted as dropped and
/// the next batch tries again; consecutive failures are logged once.
fn write_batch(path: &str, sink: &mut Sink, batch: &[u8], dropped: &AtomicU64) {
    let done = match &mut sink.to {
        Some(to) => write_all(to, batch),
        None => open_log(path).and_then(|mut to| {
            write_all(&mut to, batch)?;
            sink.to = Some(to);
            Ok(())
        }),
    };
    if let Err(error) = done {
        let lines = memchr::memchr_iter(b'\n', batch).count();
        dropped.fetch_add(lines as u64, Ordering::Relaxed);
        if !sink.failing {
            tracing::warn!(path, %error, "cannot write the access log; its lines are lost");
        }
        *sink = Sink { to: None, failing: true };
    } else {
        sink.failing = false;
    }
}

fn write_all(to: &mut Box<dyn Write>, batch: &[u8]) -> io::Result<()> {
    to.write_all(batch)?;
    to.flush()
}

fn open_log(path: &str) -> io::Result<Box<dyn Write>> {
    Ok(match path {
        "/dev/stdout" => Box::new(io::stdout()),
        "/dev/stderr" => Box::new(io::stderr()),
        path => Box::new(OpenOptions::new().create(true).append(true).open(path)?),
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere leaves only complete lines.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
