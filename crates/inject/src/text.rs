//! Writes YAML. Texts that could be read as something else are written in quotes.

use std::fmt::Write as _;

use serde_json::Value;

/// Returns a document in block style, with a line feed at its end.
pub fn yaml(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => block(value, 0, &mut out),
        Value::Array(items) if !items.is_empty() => block(value, 0, &mut out),
        other => {
            scalar(other, &mut out);
            out.push('\n');
        }
    }
    out
}

/// Writes a mapping or a list that is not empty, from the start of a line.
fn block(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(map) => {
            for (index, (key, value)) in map.iter().enumerate() {
                if index > 0 {
                    pad(indent, out);
                }
                text(key, out);
                out.push(':');
                nested(value, indent + 2, out);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    pad(indent, out);
                }
                out.push('-');
                if is_block(item) {
                    out.push(' ');
                    block(item, indent + 2, out);
                } else {
                    nested(item, indent + 2, out);
                }
            }
        }
        _ => {}
    }
}

/// Writes the value after a key or a dash.
fn nested(value: &Value, indent: usize, out: &mut String) {
    if is_block(value) {
        // A list may have the indentation of its key.
        let indent = if value.is_array() { indent - 2 } else { indent };
        out.push('\n');
        pad(indent, out);
        block(value, indent, out);
    } else {
        out.push(' ');
        scalar(value, out);
        out.push('\n');
    }
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => false,
    }
}

fn pad(indent: usize, out: &mut String) {
    out.extend(std::iter::repeat_n(' ', indent));
}

fn scalar(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(truth) => out.push_str(if *truth { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&number.to_string()),
        Value::String(value) => text(value, out),
        Value::Array(_) => out.push_str("[]"),
        Value::Object(_) => out.push_str("{}"),
    }
}

fn text(value: &str, out: &mut String) {
    if is_plain(value) {
        out.push_str(value);
        return;
    }
    out.push('"');
    for c in value.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if c.is_control() || ['\u{2028}', '\u{2029}', '\u{feff}'].contains(&c) => {
                // Control characters are below U+10000. Writing to a String does not fail.
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// Returns whether a text needs no quotes: a letter or a slash, then letters, digits and some marks. Words of YAML and
/// numbers such as `.inf` are not among them. A colon inside of such a text ends no key.
fn is_plain(text: &str) -> bool {
    const WORDS: [&str; 8] = ["true", "false", "null", "yes", "no", "on", "off", "n"];
    let Some(first) = text.bytes().next() else { return false };
    (first.is_ascii_alphabetic() || first == b'/')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._:-".contains(&byte))
        && !text.ends_with(':')
        && text != "y"
        && !WORDS.iter().any(|word| text.eq_ignore_ascii_case(word))
        && text != "Y"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_written_is_read_again() {
        let value = json!({
            "a": [], "b": {}, "c": null, "d": [[1, [2, "x"]], { "e": [{ "f": 1, "g": [true] }], "h": "i" }, []],
            "texts": ["", "yes", "No", "y", "1", "1e3", "0x1f", "-", "- a", "a: b", "a:", "a:b", "a #b", " a", "~", "\u{85}\u{2028}",
                      "line\nbreak\t\"quoted\" \\ ü \u{7f}", ".inf", "2001-01-01", "/a/b", "{}", "*", "&a", "!t"],
            "key: with #": -1.5, "9": "b", "true": false, "": 18446744073709551615u64,
        });
        let text = yaml(&value);
        let mut documents = skysail_yaml::documents(&text);
        let read = documents.next().and_then(|document| document.root.ok()).map(|root| root.to_json());
        assert_eq!(read, Some(value), "{text}");
        assert!(documents.next().is_none());
        assert_eq!(yaml(&json!({ "a": [{ "b": "c" }] })), "a:\n- b: c\n");
    }
}
