//! Reads the fields of messages from proto files: those of the mesh configuration, for which no definition of a
//! Kubernetes kind exists.
//!
//! This reads just the declarations of messages, fields and enums in proto3. Anything else fails the test.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter::Peekable,
    vec::IntoIter,
};

/// Maximum depth of fields, so that a message that contains itself fails the test.
const MAX_DEPTH: usize = 16;

/// Messages with their fields, and the names of enums.
#[derive(Default)]
pub(crate) struct Messages {
    messages: BTreeMap<String, Vec<Field>>,
    enums: BTreeSet<String>,
}

struct Field {
    name: String,
    /// Name of the type as written.
    of: String,
    is_map: bool,
}

impl Messages {
    /// Reads files.
    pub(crate) fn parse(texts: &[String]) -> Self {
        let mut messages = Self::default();
        for text in texts {
            let mut file = File { tokens: tokens(text).into_iter().peekable(), into: &mut messages };
            file.body("");
        }
        messages
    }

    /// Returns the paths of the fields of a message that hold no other fields, as in YAML.
    pub(crate) fn leaves(&self, message: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        self.add_leaves(message, "", 0, &mut found);
        found
    }

    fn add_leaves(&self, message: &str, path: &str, depth: usize, found: &mut BTreeSet<String>) {
        assert!(depth < MAX_DEPTH, "{path} is too deep");
        for field in &self.messages[message] {
            let name = json_name(&field.name);
            let mut own = if path.is_empty() { name } else { format!("{path}.{name}") };
            match self.resolve(message, &field.of).filter(|of| !self.messages[of].is_empty()) {
                Some(of) => {
                    own.push_str(if field.is_map { ".*" } else { "" });
                    self.add_leaves(&of, &own, depth + 1, found);
                }
                None => _ = found.insert(own),
            }
        }
    }

    /// Returns the whole name of the message that a type within a message means; `None` for scalars and enums.
    fn resolve(&self, within: &str, of: &str) -> Option<String> {
        let ends = within.match_indices('.').map(|(end, _)| end).chain([within.len()]);
        let names = ends.rev().map(|end| format!("{}.{of}", &within[..end])).chain([of.to_owned()]);
        for name in names {
            if self.messages.contains_key(&name) {
                return Some(name);
            }
            if self.enums.contains(&name) {
                return None;
            }
        }
        let is_scalar = of.starts_with("google.protobuf.")
            || of.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        assert!(is_scalar, "the type {of} in {within} is in none of the files");
        None
    }
}

/// A file that is read.
struct File<'a> {
    tokens: Peekable<IntoIter<String>>,
    into: &'a mut Messages,
}

impl File<'_> {
    fn next(&mut self) -> String {
        self.tokens.next().unwrap_or_default()
    }

    fn expect(&mut self, token: &str) {
        assert_eq!(self.next(), token);
    }

    /// Skips the tokens up to one that ends a declaration.
    fn skip_to(&mut self, end: &str) {
        while self.tokens.peek().is_some() && self.next() != end {}
    }

    /// Reads declarations up to the end of a message, of a `oneof`, or of the file. `within` is the name of the message
    /// or of the package.
    fn body(&mut self, within: &str) {
        let mut package = within.to_owned();
        while let Some(token) = self.tokens.next() {
            let full = |name: &str| format!("{package}.{name}");
            match token.as_str() {
                "}" => return,
                ";" => {}
                "package" => {
                    package = self.next();
                    self.expect(";");
                }
                "syntax" | "import" | "option" | "reserved" => self.skip_to(";"),
                "message" => {
                    let name = full(&self.next());
                    self.expect("{");
                    self.into.messages.insert(name.clone(), Vec::new());
                    self.body(&name);
                }
                "enum" => {
                    let name = full(&self.next());
                    self.into.enums.insert(name);
                    self.skip_to("}");
                }
                "oneof" => {
                    self.next();
                    self.expect("{");
                    self.body(within);
                }
                "repeated" | "optional" => {
                    let of = self.next();
                    self.field(within, of, false);
                }
                "map" => {
                    self.skip_to(",");
                    let of = self.next();
                    self.expect(">");
                    self.field(within, of, true);
                }
                of => self.field(within, of.to_owned(), false),
            }
        }
    }

    /// Reads a field after its type.
    fn field(&mut self, within: &str, of: String, is_map: bool) {
        let name = self.next();
        self.expect("=");
        self.skip_to(";");
        self.into.messages.get_mut(within).unwrap().push(Field { name, of, is_map });
    }
}

/// Returns the tokens of a file: words with dots, and single characters. Texts become empty tokens.
fn tokens(text: &str) -> Vec<String> {
    let (mut found, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(inner) = rest.strip_prefix(['"', '\'']) {
            found.push(String::new());
            text_length(inner, first) + 1
        } else if is_word(first) {
            let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            found.push(rest[..length].to_owned());
            length
        } else {
            if !first.is_whitespace() {
                found.push(first.to_string());
            }
            first.len_utf8()
        };
        rest = &rest[length..];
    }
    found
}

/// Returns the length of a text after its first quote, with its last one.
fn text_length(inner: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in inner.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    inner.len()
}

/// Returns the name of a field in JSON.
fn json_name(name: &str) -> String {
    let mut parts = name.split('_');
    let mut made = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let mut letters = part.chars();
        made.extend(letters.next().map(|c| c.to_ascii_uppercase()));
        made.push_str(letters.as_str());
    }
    made
}
