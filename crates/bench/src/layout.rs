//! Formats tables and paragraphs to the width of a terminal.
//!
//! A table with more columns than fit is split into several, one below the other, each with the key columns first. It
//! remains Markdown, which a table with wrapped cells is not.

use comfy_table::{CellAlignment, Table, presets::ASCII_MARKDOWN};

/// Maximum width of tables and paragraphs, in columns.
pub(crate) const WIDTH: usize = 100;
/// Width of the border and the spaces of a cell, as in `| text `.
const CELL: usize = 3;

/// A table as text, cell by cell.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TextTable {
    pub(crate) head: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl TextTable {
    /// Returns the table as [`tables`] does, with this number of key columns.
    pub(crate) fn markdown(&self, keys: usize) -> String {
        tables(keys, &self.head, &self.rows)
    }
}

/// Returns the rows as Markdown tables that are at most [`WIDTH`] wide, unless one cell is wider. The first `keys`
/// columns begin each of them.
pub(crate) fn tables(keys: usize, head: &[String], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).chain(head.get(column));
        cells.map(|text| text.chars().count()).max().unwrap_or_default() + CELL
    };
    // The last border takes one more column.
    let room = WIDTH.saturating_sub(1 + (0..keys).map(width).sum::<usize>());
    let mut parts: Vec<Vec<usize>> = vec![Vec::new()];
    let mut left = room;
    for column in keys..head.len() {
        let width = width(column);
        if width > left && parts.last().is_some_and(|part| !part.is_empty()) {
            parts.push(Vec::new());
            left = room;
        }
        left = left.saturating_sub(width);
        parts.last_mut().into_iter().for_each(|part| part.push(column));
    }
    let parts = parts.iter().map(|part| table(keys, part, head, rows).to_string());
    parts.collect::<Vec<_>>().join("\n\n")
}

fn table(keys: usize, columns: &[usize], head: &[String], rows: &[Vec<String>]) -> Table {
    let cells = |line: &[String]| -> Vec<String> {
        let columns = (0..keys).chain(columns.iter().copied());
        columns.filter_map(|column| line.get(column).cloned()).collect()
    };
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header(cells(head));
    table.add_rows(rows.iter().map(|row| cells(row)));
    for column in table.column_iter_mut().skip(keys) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Returns the text with line breaks at spaces, so that lines have at most [`WIDTH`] columns. A longer word has its
/// own line.
pub(crate) fn paragraph(text: &str) -> String {
    let mut lines = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > WIDTH {
            lines.push('\n');
            column = 0;
        } else if column > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines
}

/// Fails a test if a line of a text is too wide for a terminal.
#[cfg(test)]
pub(crate) fn assert_fits(text: &str) {
    let wide: Vec<&str> = text.lines().filter(|line| line.chars().count() > WIDTH).collect();
    assert!(wide.is_empty(), "{wide:#?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings<const N: usize>(texts: [&str; N]) -> Vec<String> {
        texts.map(str::to_owned).to_vec()
    }

    #[test]
    fn wide_tables_are_split_with_the_key_columns_repeated() {
        let wide = "9".repeat(40);
        let head = strings(["key", "a", "b", "c", "d"]);
        let rows = [strings(["k", &wide, &wide, &wide, "1"])];
        let text = tables(1, &head, &rows);
        assert_fits(&text);
        let lines: Vec<&str> = text.lines().collect();
        let of = |line: &str| line.split('|').map(str::trim).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(of(lines[0]), ["", "key", "a", "b", ""]);
        assert_eq!(lines[3], "");
        assert_eq!(of(lines[4]), ["", "key", "c", "d", ""]);
        assert_eq!(of(lines[6]), ["", "k", &wide, "1", ""]);
    }

    #[test]
    fn a_table_may_fill_the_width_exactly() {
        let head = strings(["key", "a"]);
        let full = tables(1, &head, &[strings(["key", &"9".repeat(WIDTH - 10)])]);
        assert_eq!(full.lines().map(|line| line.chars().count()).max(), Some(WIDTH));
        assert_eq!(full.lines().count(), 3);
        // A column wider than the terminal has a table of its own.
        let head = strings(["key", "a", "b"]);
        let text = tables(1, &head, &[strings(["key", "1", &"9".repeat(WIDTH)])]);
        assert_eq!(text.lines().count(), 7);
    }

    #[test]
    fn paragraphs_break_between_words() {
        let word = "µ".repeat(49);
        assert_eq!(paragraph(&format!("{word}  {word} x")), format!("{word} {word}\nx"));
        let long = "x".repeat(WIDTH + 1);
        assert_eq!(paragraph(&format!("a {long} b")), format!("a\n{long}\nb"));
        assert_eq!(paragraph(""), "");
    }
}
