//! Output of `skysail up`: progress and the table on standard output, redrawn in place on a terminal ([`Screen`]). With
//! `--output json`, progress is written to standard error. Bursts of messages are grouped in text output and complete
//! in JSON output.

use std::{
    fs::{self, File, OpenOptions},
    io::Write as _,
    path::PathBuf,
    time::{Duration, Instant},
};

use skysail_core::{logging::printable, stdio};

use crate::{
    burst::Bursts,
    edges::{self, Size},
    input::Input,
    screen::{self, Screen},
    traffic::Edge,
    view::Output,
};

/// Interval at which the table is printed without a terminal.
const PRINT: Duration = Duration::from_secs(10);
/// Maximum size of the file of unprinted messages, in bytes.
const MAX_LOG: usize = 16 << 20;

/// Output of progress.
#[derive(Debug)]
pub(crate) struct Console {
    output: Output,
    /// The mesh's folder.
    folder: PathBuf,
    /// Present on a terminal.
    screen: Option<Screen>,
    bursts: Bursts,
    unprinted: Unprinted,
    printed: Instant,
}

/// File of the messages that were counted and not printed.
#[derive(Debug)]
struct Unprinted {
    path: PathBuf,
    file: Option<File>,
    room: usize,
}

impl Console {
    /// Creates the output of the mesh with this folder. Grouped messages are written to `logs/up.log` there.
    pub(crate) fn new(output: Output, folder: PathBuf) -> Self {
        let terminal = if output == Output::Json { None } else { screen::terminal() };
        Self {
            output,
            screen: terminal.map(Screen::new),
            bursts: Bursts::default(),
            unprinted: Unprinted { path: folder.join("logs/up.log"), file: None, room: MAX_LOG },
            folder,
            printed: Instant::now(),
        }
    }

    /// Prints a line of progress. Control characters are escaped, because names and messages come from files and
    /// programs.
    pub(crate) fn line(&mut self, text: &str) -> anyhow::Result<()> {
        let text = printable(self.named(text));
        if self.output == Output::Json {
            stdio::print_error(text);
            return Ok(());
        }
        match (&mut self.screen, screen::terminal()) {
            (Some(screen), Some(size)) => Ok(stdio::write(screen.line(&text, size).as_bytes())?),
            _ => Ok(stdio::print(text)?),
        }
    }

    /// Returns a message with the user's names of files.
    pub(crate) fn named(&self, message: &str) -> String {
        Input::named_in(message, &self.folder)
    }

    /// Prints a message, unless a group of similar messages is open; then it is counted.
    pub(crate) fn message(&mut self, text: &str) -> anyhow::Result<()> {
        if self.output == Output::Json || self.bursts.admit(text, Instant::now()) {
            return self.line(text);
        }
        self.unprinted.keep(&self.named(text));
        Ok(())
    }

    /// Returns the time of the next call of [`Self::count`].
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.bursts.deadline()
    }

    /// Prints the number of grouped messages, for groups that end by this time or for all.
    pub(crate) fn count(&mut self, by: Option<Instant>) -> anyhow::Result<()> {
        for line in self.bursts.over(by) {
            self.line(&format!("{line} ({})", self.unprinted.location()))?;
        }
        Ok(())
    }

    /// Draws the table of edges in place of the last one. Without a terminal, prints it every [`PRINT`].
    pub(crate) fn table(&mut self, edges: &[Edge]) -> anyhow::Result<()> {
        match (&mut self.screen, screen::terminal()) {
            _ if self.output == Output::Json || edges.is_empty() => Ok(()),
            (Some(screen), Some(size)) => Ok(stdio::write(screen.table(edges, size).as_bytes())?),
            _ if self.printed.elapsed() < PRINT => Ok(()),
            _ => {
                self.printed = Instant::now();
                let lines = edges::lines(edges, screen::paper());
                Ok(stdio::print(format_args!("\n{}", lines.join("\n")))?)
            }
        }
    }

    /// Removes the last table from the terminal.
    pub(crate) fn end(&mut self) -> anyhow::Result<()> {
        match (&mut self.screen, screen::terminal()) {
            (Some(screen), Some(size)) => Ok(stdio::write(screen.end(size).as_bytes())?),
            _ => Ok(()),
        }
    }

    /// Returns a table of all edges: of any height, and on a terminal at most as wide.
    pub(crate) fn whole(&self, edges: &[Edge]) -> String {
        let size = screen::terminal().unwrap_or_else(screen::paper);
        edges::lines(edges, Size { rows: Size::UNBOUNDED.rows, ..size }).join("\n")
    }
}

impl Unprinted {
    fn keep(&mut self, text: &str) {
        let line = format!("{}\n", printable(text));
        // After the first message that does not fit, no further one is written.
        self.room = self.room.saturating_sub(line.len());
        if self.room == 0 {
            return;
        }
        if self.file.is_none() {
            self.path.parent().map(fs::create_dir_all);
            self.file = OpenOptions::new().create(true).append(true).open(&self.path).ok();
        }
        if self.file.as_mut().is_none_or(|file| file.write_all(line.as_bytes()).is_err()) {
            self.room = 0;
        }
    }

    /// Returns the location of the messages, for a sentence.
    fn location(&self) -> String {
        let path = self.path.display();
        match (&self.file, self.room) {
            (Some(_), 1..) => format!("all are in {path}"),
            (Some(_), 0) => format!("{path} has the first ones and is full"),
            (None, _) => format!("{path} cannot be written, so they are lost"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grouped_messages_are_written_up_to_a_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("up.log");
        let mut unprinted = Unprinted { path: path.clone(), file: None, room: 20 };
        unprinted.keep("one\u{1b}[2J");
        assert!(unprinted.location().starts_with("all are in "), "{}", unprinted.location());
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\\u{1b}[2J\n");
        unprinted.keep("another one");
        assert!(unprinted.location().contains("is full"), "{}", unprinted.location());
        let nowhere = path.join("up.log");
        let mut unprinted = Unprinted { path: nowhere, file: None, room: 20 };
        unprinted.keep("one");
        assert!(unprinted.location().contains("lost"), "{}", unprinted.location());
    }
}
