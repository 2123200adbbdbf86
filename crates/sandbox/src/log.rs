//! Logs of programs: what a program writes goes through a pipe into a file of bounded length.
//!
//! The folder of a mesh may be in memory, and programs may write for days. A file that is full becomes the previous
//! part, in the place of the one before it, so a log takes at most twice [`PART`].

use std::{
    convert::Infallible,
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{fd::OwnedFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use tokio::net::unix::pipe;

/// The most bytes of a file.
const PART: u64 = 16 << 20;
/// Bytes that are read at once.
const PIECE: usize = 16 << 10;
/// Pieces that are read in a row: other tasks of the thread get their turn.
const IN_A_ROW: usize = 16;

/// What a program writes, on its way to its log.
#[derive(Debug)]
pub(crate) struct Output {
    from: pipe::Receiver,
    to: Writer,
}

impl Output {
    /// Makes the pipe. Its end is for the program.
    pub(crate) fn new(log: &Path) -> io::Result<(OwnedFd, Self)> {
        let to = Writer::open(log, PART)?;
        let (end, from) = pipe::pipe()?;
        Ok((end.into_blocking_fd()?, Self { from, to }))
    }

    /// Passes on what is written, until it is dropped.
    pub(crate) async fn pass_on(&mut self) -> Infallible {
        loop {
            if self.from.readable().await.is_err() || !self.take() {
                return std::future::pending().await;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Passes on what was written before the program ended.
    pub(crate) fn finish(mut self) {
        self.take();
    }

    /// Passes on what is there. Returns whether more may come.
    fn take(&mut self) -> bool {
        let mut piece = [0; PIECE];
        for _ in 0..IN_A_ROW {
            match self.from.try_read(&mut piece) {
                Ok(0) => return false,
                Ok(length) => self.to.write(&piece[..length]),
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            }
        }
        true
    }
}

/// A log that is written to.
#[derive(Debug)]
struct Writer {
    path: PathBuf,
    file: File,
    length: u64,
    /// The most bytes of a file.
    part: u64,
    /// The last attempt to write failed.
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

    /// Writes or loses these bytes: a program does not wait for its log.
    fn write(&mut self, bytes: &[u8]) {
        match self.try_write(bytes) {
            Ok(()) => self.is_failing = false,
            Err(error) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(log = %self.path.display(), %error, "the log cannot be written; its lines are lost");
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

/// A log that is read, also while it is written.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: Option<File>,
}

impl Reader {
    /// Reads from the beginning of what is kept.
    pub fn new(path: PathBuf) -> Self {
        Self { path, file: None }
    }

    /// The file that is written to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What has been written since the last time.
    ///
    /// # Errors
    /// When the file is not there or cannot be read.
    pub fn more(&mut self) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        let mut now = match (File::open(&self.path), &mut self.file) {
            // It has become the previous part just now, and the next one is about to be made.
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
                // The file that is written to may have become the previous part just now.
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

/// The file of the part before this one: `a.log.1`.
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
            assert_eq!(reader.more().unwrap(), line.as_bytes(), "a reader that follows misses nothing");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "three\n");
        assert_eq!(Reader::new(path.clone()).more().unwrap(), b"two 2\nthree\n");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 2);
        // A program that is started again goes on in the same file.
        let mut writer = Writer::open(&path, 10).unwrap();
        writer.write(b"four\n");
        assert_eq!(Reader::new(path).more().unwrap(), b"three\nfour\n");
        writer.write(b"longer than a part\n");
        assert_eq!(reader.more().unwrap(), b"four\nlonger than a part\n");
    }

    #[test]
    fn a_log_that_is_not_there_is_an_error() {
        assert!(Reader::new("/nowhere/a.log".into()).more().is_err());
    }
}
