//! The terminal of `skysail up`: progress lines that scroll, and below them a table that is redrawn in place.
//!
//! A redraw moves the cursor up by the table's rows and clears from there. Each line of the table must
//! therefore take one row, and all lines must be on the screen: [`edges::lines`] fits them. After a resize
//! the position of the rows is unknown, because terminals rewrap lines in different ways. The screen is
//! therefore cleared, and the last progress lines are printed again.

use std::{
    collections::VecDeque,
    fmt::Write as _,
    io::{self, IsTerminal as _},
};

use rustix::termios::tcgetwinsize;

use crate::{
    edges::{self, Size, width},
    traffic::Edge,
};

/// Default size if the terminal reports none; that of a VT100.
const DEFAULT_SIZE: Size = Size { columns: 80, rows: 24 };
/// Maximum number of progress lines kept for a redraw: more than a screen has.
const MAX_PROGRESS: usize = 200;

/// Content of the terminal. The methods return the bytes to write to it.
#[derive(Debug)]
pub(crate) struct Screen {
    size: Size,
    progress: VecDeque<String>,
    /// The table, with the blank line above it.
    table: Vec<String>,
}

/// Returns the size of the terminal on standard output; `None` for a file, a pipe or a dumb terminal.
pub(crate) fn terminal() -> Option<Size> {
    let out = io::stdout();
    if !out.is_terminal() || std::env::var_os("TERM").is_some_and(|name| name == "dumb") {
        return None;
    }
    let known = tcgetwinsize(&out).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
    Some(known.map_or(DEFAULT_SIZE, |size| Size { columns: size.ws_col.into(), rows: size.ws_row.into() }))
}

/// Returns the size of a table without a terminal: COLUMNS and LINES; unbounded by default.
pub(crate) fn paper() -> Size {
    let variable = |name: &str| std::env::var(name).ok()?.parse().ok().filter(|number| *number > 0);
    Size { columns: variable("COLUMNS").unwrap_or(usize::MAX), rows: variable("LINES").unwrap_or(usize::MAX) }
}

impl Screen {
    /// Creates an empty screen.
    pub(crate) fn new(size: Size) -> Self {
        Self { size, progress: VecDeque::new(), table: Vec::new() }
    }

    /// Prints a line of progress above the table.
    pub(crate) fn line(&mut self, text: &str, size: Size) -> String {
        let mut out = self.erase(size);
        let _ = writeln!(out, "{text}");
        self.progress.truncate(MAX_PROGRESS - 1);
        self.progress.push_front(text.to_owned());
        self.draw(&mut out);
        out
    }

    /// Replaces the table. Progress lines keep at least a third of the screen, if there are enough.
    pub(crate) fn table(&mut self, edges: &[Edge], size: Size) -> String {
        let mut out = self.erase(size);
        let progress: usize = self.progress.iter().map(|line| rows(line, size)).sum();
        // The cursor's row and the blank line are not available.
        let room = size.rows.saturating_sub(2 + progress.min(size.rows / 3));
        self.table = edges::lines(edges, Size { columns: size.columns, rows: room });
        if !self.table.is_empty() {
            self.table.insert(0, String::new());
        }
        self.draw(&mut out);
        out
    }

    /// Removes the table.
    pub(crate) fn end(&mut self, size: Size) -> String {
        let out = self.erase(size);
        self.table.clear();
        out
    }

    fn draw(&self, out: &mut String) {
        for line in &self.table {
            let _ = writeln!(out, "{line}");
        }
    }

    /// Clears the rows of the table, or the screen if the rows are unknown.
    fn erase(&mut self, size: Size) -> String {
        let before = std::mem::replace(&mut self.size, size);
        match self.table.len() {
            0 => String::new(),
            rows if before == size => format!("\r\x1b[{rows}A\x1b[J"),
            _ => {
                // The table is drawn at the next poll; its present lines could wrap at the new width.
                self.table.clear();
                let mut room = size.rows.saturating_sub(1);
                let fits = |line: &&String| match room.checked_sub(rows(line, size)) {
                    Some(left) => {
                        room = left;
                        true
                    }
                    None => false,
                };
                let lines: Vec<&String> = self.progress.iter().take_while(fits).collect();
                let mut out = "\x1b[H\x1b[2J".to_owned();
                lines.into_iter().rev().for_each(|line| _ = writeln!(out, "{line}"));
                out
            }
        }
    }
}

/// Returns the number of rows that a line takes.
fn rows(line: &str, size: Size) -> usize {
    width(line).div_ceil(size.columns.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use skysail_testkit::Terminal;

    use super::*;
    use crate::edges::tests::edge;

    fn many(count: u32) -> Vec<Edge> {
        (0..count)
            .map(|n| {
                edge("recommendations/recommendation-v1", &format!("shop/stock-{n}"), f64::from(n), 100.0)
            })
            .collect()
    }

    #[test]
    fn the_table_is_redrawn_in_place() {
        for (columns, rows) in [(80, 24), (40, 10), (200, 50), (10, 4), (1, 1)] {
            let size = Size { columns, rows };
            let mut terminal = Terminal::new(columns, rows);
            let mut screen = Screen::new(size);
            let mut printed = Vec::new();
            for round in 0..60_u32 {
                let text = format!("line {round} {}", "x".repeat(7 * round as usize % 200));
                terminal.write(screen.line(&text, size).as_bytes());
                printed.push(text);
                terminal.write(screen.table(&many(round % 30), size).as_bytes());
                let headers = terminal.screen().matches("FROM").count();
                assert!(headers <= 1, "{columns}x{rows}:\n{}", terminal.screen());
                assert_eq!(terminal.scrolled().matches("shop/").count(), 0, "{columns}x{rows}");
            }
            terminal.write(screen.end(size).as_bytes());
            let expected: String = printed.iter().map(|line| wrapped(line, columns)).collect();
            assert_eq!(
                format!("{}{}", terminal.scrolled(), terminal.screen()).trim_end(),
                expected.trim_end()
            );
        }
    }

    /// Returns a line as a terminal wraps it.
    fn wrapped(line: &str, columns: usize) -> String {
        let cells: Vec<char> = line.chars().collect();
        let rows =
            cells.chunks(columns).map(|row| row.iter().collect::<String>().trim_end().to_owned() + "\n");
        rows.collect()
    }

    #[test]
    fn a_new_size_clears_the_screen_and_keeps_the_last_lines() {
        let (wide, narrow) = (Size { columns: 80, rows: 24 }, Size { columns: 40, rows: 10 });
        let mut screen = Screen::new(wide);
        let mut terminal = Terminal::new(80, 24);
        for round in 0..30 {
            terminal.write(screen.line(&format!("line {round} {}", "x".repeat(50)), wide).as_bytes());
        }
        terminal.write(screen.table(&many(30), wide).as_bytes());
        terminal.resize(40, 10);
        terminal.write(screen.table(&many(30), narrow).as_bytes());
        let text = terminal.screen();
        assert_eq!(text.matches("FROM").count(), 1, "{text}");
        assert!(
            text.contains("line 29 x") && text.contains("… 27 more edges: enlarge the terminal"),
            "{text}"
        );
        assert!(!text.contains("line 0 "), "{text}");
    }

    #[test]
    fn at_least_a_third_of_the_screen_shows_progress() {
        let size = Size { columns: 80, rows: 24 };
        let mut screen = Screen::new(size);
        let mut terminal = Terminal::new(80, 24);
        for round in 0..30 {
            terminal.write(screen.line(&format!("line {round}"), size).as_bytes());
        }
        terminal.write(screen.table(&many(100), size).as_bytes());
        assert_eq!(terminal.screen().matches("line ").count(), 8, "{}", terminal.screen());
    }
}
