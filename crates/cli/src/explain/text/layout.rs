//! Lines of at most [`WIDTH`] columns: labels, values and sources.

use skysail_core::logging::printable;
use unicode_width::UnicodeWidthStr as _;

use super::{Source, Text};

/// Maximum width of a line in columns.
const WIDTH: usize = 100;
/// Width of labels.
const LABEL: usize = 15;

impl Text<'_> {
    pub(super) fn source(&mut self, source: Option<&Source>) {
        let Some(Source { object, field, file, line }) = source else { return };
        let field = if field.is_empty() { String::new() } else { format!(" {field}") };
        let place = match (file.as_str(), line) {
            ("", _) => String::new(),
            (file, 0) => format!(", {}", self.relative(file)),
            (file, line) => format!(", {}:{line}", self.relative(file)),
        };
        self.wrapped(&" ".repeat(LABEL + 4), &format!("<- {object}{field}{place}"), LABEL + 7);
    }

    pub(super) fn title(&mut self, title: &str) {
        self.out.push('\n');
        self.line(0, title);
    }

    pub(super) fn field(&mut self, label: &str, value: &str) {
        let label = printable(label);
        let gap = LABEL.saturating_sub(label.width()).max(1);
        self.wrapped(&format!("  {label}{}", " ".repeat(gap)), value, LABEL + 4);
    }

    pub(super) fn line(&mut self, indent: usize, text: &str) {
        self.wrapped(&" ".repeat(indent), text, indent + 4);
    }

    /// Adds a text after a first part, and breaks it so that no line is too wide. Further lines are indented.
    fn wrapped(&mut self, first: &str, text: &str, indent: usize) {
        let mut line = first.to_owned();
        let mut is_empty = true;
        for word in printable(text).split(' ') {
            let mut word = word;
            let gap = usize::from(!is_empty);
            if !is_empty && line.width() + gap + word.width() > WIDTH {
                self.end_line(&mut line, indent);
                is_empty = true;
            }
            if !is_empty {
                line.push(' ');
            }
            while line.width() + word.width() > WIDTH {
                let room = WIDTH.saturating_sub(line.width()).max(1);
                let (head, tail) = split(word, room);
                line.push_str(head);
                self.end_line(&mut line, indent);
                word = tail;
            }
            line.push_str(word);
            is_empty = false;
        }
        self.out.push_str(line.trim_end());
        self.out.push('\n');
    }

    fn end_line(&mut self, line: &mut String, indent: usize) {
        self.out.push_str(line.trim_end());
        self.out.push('\n');
        *line = " ".repeat(indent);
    }

    /// Returns a text without the base folder in paths.
    pub(super) fn relative(&self, text: &str) -> String {
        match self.base.to_str() {
            Some(base) if !base.is_empty() && base != "/" => text.replace(&format!("{base}/"), ""),
            _ => text.to_owned(),
        }
    }
}

/// Splits a word before the character that exceeds a width.
fn split(word: &str, width: usize) -> (&str, &str) {
    let mut end = 0;
    for (at, character) in word.char_indices() {
        let next = at + character.len_utf8();
        if end > 0 && word[..next].width() > width {
            break;
        }
        end = next;
    }
    word.split_at(end)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn no_line_is_wider_than_the_limit() {
        let mut text =
            Text { out: String::new(), base: Path::new(""), unit: "requests", decisions: Vec::new() };
        text.field("cluster", &"x".repeat(250));
        text.field("route", &"some words ".repeat(40));
        text.field("wide", &"漢".repeat(120));
        text.field("control", "a\u{1b}[31mb\nc");
        assert!(text.out.lines().all(|line| line.width() <= WIDTH), "{}", text.out);
        assert!(!text.out.contains('\u{1b}'));
        assert_eq!(text.out.matches('x').count(), 250);
        assert_eq!(text.out.matches('漢').count(), 120);
    }

    #[test]
    fn files_are_shown_relative_to_the_folder() {
        let mut text = Text {
            out: String::new(),
            base: Path::new("/home/ann/shop"),
            unit: "requests",
            decisions: Vec::new(),
        };
        text.source(Some(&Source {
            object: "Service shop/web".to_owned(),
            field: "spec.ports[0]".to_owned(),
            file: "/home/ann/shop/mesh/a.yaml".to_owned(),
            line: 7,
        }));
        assert_eq!(text.out.trim(), "<- Service shop/web spec.ports[0], mesh/a.yaml:7");
    }
}
