//! Splits a text at its `---` lines.

use std::iter;

/// Returns the chunks of a text that have a document.
pub(crate) fn contents(text: &str) -> impl Iterator<Item = (u32, &str)> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    chunks(text).filter(|(_, chunk)| !is_blank(chunk))
}

/// Returns whether a text has no document. A parser for each of a million separators would take seconds.
fn is_blank(chunk: &str) -> bool {
    let is_comment = |line: &str| line.is_empty() || line.starts_with('#');
    chunk.lines().all(|line| line.trim_end() == "---" || is_comment(line.trim_start()))
}

/// Splits at `---` lines. Returns each chunk with the number of lines before it.
fn chunks(text: &str) -> impl Iterator<Item = (u32, &str)> {
    let mut rest = Some(text);
    let mut before = 0_u32;
    iter::from_fn(move || {
        let text = rest?;
        let (chunk, lines) = first_chunk(text);
        rest = text.get(chunk.len()..).filter(|rest| !rest.is_empty());
        let chunk = (before, chunk);
        before = before.saturating_add(lines);
        Some(chunk)
    })
}

/// Returns the text before the next document, and its number of lines.
fn first_chunk(text: &str) -> (&str, u32) {
    // Directives (`%YAML 1.2`) belong to the document after the `---`.
    let mut directives_only = true;
    let (mut end, mut lines) = (0, 0_u32);
    for line in text.split_inclusive('\n') {
        let bare = line.trim_end();
        let separator = bare == "---" || bare.starts_with("--- ") || bare.starts_with("---\t");
        if separator && !directives_only {
            return (&text[..end], lines);
        }
        directives_only = if separator { false } else { directives_only && is_preamble(bare) };
        end += line.len();
        lines = lines.saturating_add(1);
    }
    (text, lines)
}

fn is_preamble(line: &str) -> bool {
    line.is_empty() || line.starts_with(['#', '%'])
}
