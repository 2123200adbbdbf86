//! The part of a terminal that `skysail up` uses: text, line ends, moves of the cursor, clearing.

/// A screen of cells. Panics on a control sequence that it does not know.
#[derive(Debug)]
pub struct Terminal {
    columns: usize,
    /// Rows of the screen, from the top.
    screen: Vec<String>,
    /// Rows that have scrolled off the top.
    scrolled: String,
    row: usize,
    column: usize,
    /// Bytes of an incomplete sequence or character.
    pending: Vec<u8>,
}

impl Terminal {
    /// Creates an empty screen of this size.
    pub fn new(columns: usize, rows: usize) -> Self {
        let screen = vec![String::new(); rows];
        Self { columns, screen, scrolled: String::new(), row: 0, column: 0, pending: Vec::new() }
    }

    /// Changes the size as xterm does: lines are truncated, and the rows around the cursor stay.
    pub fn resize(&mut self, columns: usize, rows: usize) {
        self.columns = columns;
        let scrolled = self.row.saturating_sub(rows - 1);
        self.screen.drain(..scrolled);
        self.row -= scrolled;
        self.screen.resize(rows, String::new());
        for line in &mut self.screen {
            *line = line.chars().take(columns).collect();
        }
        self.column = self.column.min(columns);
    }

    /// Returns the text on the screen.
    pub fn screen(&self) -> String {
        self.screen.iter().map(|line| line.trim_end().to_owned() + "\n").collect()
    }

    /// Returns the text that has scrolled off the top.
    pub fn scrolled(&self) -> &str {
        &self.scrolled
    }

    /// Processes bytes that a program writes.
    pub fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.pending.push(*byte);
            let Ok(text) = std::str::from_utf8(&self.pending) else {
                assert!(self.pending.len() < 4, "no UTF-8: {:?}", self.pending);
                continue;
            };
            if let Some(sequence) = text.strip_prefix('\x1b') {
                let ends = sequence.len() > 1 && sequence.ends_with(|c: char| c.is_ascii_alphabetic());
                if ends {
                    let sequence = sequence.to_owned();
                    self.obey(&sequence);
                } else {
                    assert!(sequence.len() < 8, "an unknown sequence: {sequence:?}");
                    continue;
                }
            } else if let Some(character) = text.chars().next() {
                self.put(character);
            }
            self.pending.clear();
        }
    }

    fn obey(&mut self, sequence: &str) {
        match sequence {
            "[J" => {
                let line: String = self.screen[self.row].chars().take(self.column).collect();
                self.screen[self.row] = line;
                self.screen[self.row + 1..].fill(String::new());
            }
            "[2J" => self.screen.fill(String::new()),
            "[H" => (self.row, self.column) = (0, 0),
            _ => {
                let up = sequence.strip_prefix('[').and_then(|rest| rest.strip_suffix('A')?.parse().ok());
                let up: usize = up.unwrap_or_else(|| panic!("an unknown sequence: {sequence:?}"));
                self.row = self.row.saturating_sub(up);
            }
        }
    }

    fn put(&mut self, character: char) {
        match character {
            '\r' => self.column = 0,
            // The terminal driver adds the carriage return.
            '\n' => self.feed(),
            _ => {
                assert!(!character.is_control(), "a control character: {character:?}");
                // The cursor leaves the last column only with the next character.
                if self.column == self.columns {
                    self.feed();
                }
                let line = &mut self.screen[self.row];
                let mut cells: Vec<char> = line.chars().collect();
                cells.resize(cells.len().max(self.column + 1), ' ');
                cells[self.column] = character;
                *line = cells.into_iter().collect();
                self.column += 1;
            }
        }
    }

    fn feed(&mut self) {
        self.column = 0;
        self.row += 1;
        if self.row == self.screen.len() {
            self.row -= 1;
            let line = self.screen.remove(0);
            self.scrolled.push_str(&(line.trim_end().to_owned() + "\n"));
            self.screen.push(String::new());
        }
    }
}
