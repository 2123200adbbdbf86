//! Logs of programs: a pipe passes a program's output to a file of bounded size.
//!
//! The folder of a mesh may be in memory, and programs may run for days. A full file is renamed and replaces the
//! previous part, so a log takes at most twice [`PART`].

use std::{
    convert::Infallible,
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use tokio::net::unix::pipe;

/// Maximum size of a file, in bytes.
const PART: u64 = 16 << 20;
/// Size of a read, in bytes.
const READ_SIZE: usize = 16 << 10;
/// Number of consecutive reads before other tasks of the thread get their turn.
const MAX_READS: usize = 16;

/// Pipe from a program to its log.
#[derive(Debug)]
pub(crate) struct Output {
    from: pipe::Receiver,
    to: Writer,
}

impl Output {
    /// Creates the pipe. Returns the program's end.
    pub(crate) fn new(log: &Path) -> io::Result<(OwnedFd, Self)> {
        let to = Writer::open(log, PART)?;
        let (end, from) = pipe::pipe()?;
        Ok((end.into_blocking_fd()?, Self { from, to }))
    }

    /// Copies output to the log until the future is dropped.
    pub(crate) async fn copy(&mut self) -> Infallible {
        loop {
            if self.from.readable().await.is_err() || !self.copy_available() {
                return std::future::pending().await;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Copies the output that remained when the program ended.
    pub(crate) fn finish(mut self) {
        self.copy_available();
    }

    /// Copies the available output. Returns whether more may follow.
    fn copy_available(&mut self) -> bool {
        let mut piece = [0; READ_SIZE];
        for _ in 0..MAX_READS {
            match self.from.try_read(&mut piece) {
                Ok(0) => return false,
                Ok(length) => self.to.write(&piece[..length]),
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}

/// Write end of a log.
#[derive(Debug)]
struct Writer {
    path: PathBuf,
    file: File,
    length: u64,
    /// Maximum size of a file, in bytes.
    part: u64,
    /// True if the last write failed.
    is_failing: bool,
}

impl Writer {
    fn open(path: &Path, part: u64) -> io::Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let file = append_to(path)?;
        let length = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, length, part, is_failing: false })
    }

    /// Writes these bytes, or drops them: a program does not wait for its log.
    fn write(&mut self, bytes: &[u8]) {
        match self.try_write(bytes) {
            Ok(()) => self.is_failing = false,
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(log = %self.path.display(), %error, "cannot write the log; lines are lost until a write succeeds");
                }
            }
        }
    }

    fn try_write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.length > 0 && self.length + bytes.len() as u64 > self.part {
            fs::rename(&self.path, previous(&self.path))?;
            self.file = append_to(&self.path)?;
            self.length = 0;
        }
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        Ok(())
    }
}

/// Read end of a log, which may be written meanwhile.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: Option<File>,
}

impl Reader {
    /// Returns a reader that starts at the previous part.
    pub fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    /// Returns the path of the current part.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the bytes that were written since the last call.
    ///
    /// # Errors
    /// When the file does not exist or cannot be read.
    pub fn read_new(&mut self) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        let mut now = match (File::open(&self.path), &mut self.file) {
            // The file has just become the previous part, and the next file does not exist yet.
            (Err(error), Some(file)) if error.kind() == io::ErrorKind::NotFound => {
                file.read_to_end(&mut text)?;
                return Ok(text);
            }
            (now, _) => now?,
        };
        if let Some(file) = &mut self.file {
            file.read_to_end(&mut text)?;
            if is_same(file, &now)? {
                return Ok(text);
            }
        }
        match File::open(previous(&self.path)) {
            Ok(mut before) => {
                let is_read = self.file.as_ref().map_or(Ok(false), |file| is_same(file, &before))?;
                // The current part may have just become the previous one.
                if !is_read && !is_same(&before, &now)? {
                    before.read_to_end(&mut text)?;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        now.read_to_end(&mut text)?;
        self.file = Some(now);
        Ok(text)
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn is_same(one: &File, other: &File) -> io::Result<bool> {
    let (one, other) = (one.metadata()?, other.metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

/// Returns the path of the previous part: `a.log.1`.
fn previous(path: &Path) -> PathBuf {
    path.with_added_extension("1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_keeps_its_last_two_parts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pod/a.log");
        let mut writer = Writer::open(&path, 10).unwrap();
        let mut reader = Reader::new(path.clone());
        for line in ["one 1\n", "two 2\n", "three\n"] {
            writer.write(line.as_bytes());
            assert_eq!(reader.read_new().unwrap(), line.as_bytes(), "a reader that follows misses nothing");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(Reader::new(path.clone()).read_new().unwrap(), b"two 2\nthree\n");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 2);
        // A restarted program continues in the same file.
        let mut writer = Writer::open(&path, 10).unwrap();
        writer.write(b"four\n");
        assert_eq!(Reader::new(path).read_new().unwrap(), b"three\nfour\n");
        writer.write(b"longer than a part\n");
        assert_eq!(reader.read_new().unwrap(), b"four\nlonger than a part\n");
    }

    #[test]
    fn a_missing_log_is_an_error() {
        assert!(Reader::new("/nowhere/a.log".into()).read_new().is_err());
    }
}
