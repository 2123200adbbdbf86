//! Parses YAML, and therefore JSON, into trees whose nodes have line numbers.
//!
//! A file is split at its `---` lines before parsing, so a broken or truncated document does not affect the
//! others. In YAML, `---` at the start of a line ends a document even inside quotes, so the split never cuts
//! a valid document. Plain scalars get the types of YAML 1.1, as in Kubernetes: `yes` and `on` are booleans.
//! `plain` lists the exceptions.

mod chunks;

use std::{
    collections::HashMap,
    fmt,
    hash::{Hash, Hasher},
    iter,
};

use granit_parser::{Event, Parser, ScalarStyle, ScanError, StrInput};

use self::chunks::contents;

/// Maximum number of nodes in a document, including those of expanded aliases.
const MAX_NODES: usize = 1_000_000;
/// Maximum nesting depth. Documents that people write are less deep, and the stack allows far more.
const MAX_DEPTH: usize = 100;
/// Maximum size of an object in bytes, as JSON: Kubernetes refuses larger ones, because etcd does.
pub const MAX_OBJECT: usize = 3 << 19;
/// Maximum number of objects in a list of objects.
pub const MAX_OBJECTS: usize = 10_000;
/// Number of characters that JSON adds to a value: quotes or brackets, and a separator.
const SYNTAX: usize = 3;
/// Key of the objects in a list of objects (`kind: List`).
const ITEMS: &str = "items";
/// Maximum number of keys in a mapping.
const MAX_KEYS: usize = 10_000;
/// Maximum number of anchors in a document.
const MAX_ANCHORS: usize = 10_000;
/// Maximum number of repeated keys that are reported for a document.
const MAX_DUPLICATES: usize = 100;
/// Number of keys from which a mapping has an index. The index finds repeated keys without a quadratic search.
const INDEXED_KEYS: usize = 32;

/// A value and the line it starts on.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Line, from 1.
    pub line: u32,
    /// Value.
    pub value: Value,
}

/// Hashes the content without lines.
impl Hash for Node {
    fn hash<H: Hasher>(&self, state: &mut H) {
        std::mem::discriminant(&self.value).hash(state);
        match &self.value {
            Value::Null => {}
            Value::Bool(value) => value.hash(state),
            Value::Int(number) => number.hash(state),
            Value::Float(number) => number.to_bits().hash(state),
            Value::Text(text, _) => text.hash(state),
            Value::List(items) => items.hash(state),
            Value::Map(entries) => {
                state.write_usize(entries.len());
                entries.iter().for_each(|entry| (&entry.key, &entry.value).hash(state));
            }
        }
    }
}

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `null`, `~` or empty.
    Null,
    /// A boolean.
    Bool(bool),
    /// A whole number.
    Int(i128),
    /// Another number.
    Float(f64),
    /// Text, and whether it is a literal block (`|`), which keeps its lines.
    Text(String, bool),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order of the text.
    Map(Vec<Entry>),
}

/// A key, its line and its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Key; numbers and booleans as text.
    pub key: String,
    /// Line of the key, from 1.
    pub line: u32,
    /// Value of the key.
    pub value: Node,
}

/// A document: its tree, or the reason why it has none.
#[derive(Debug)]
pub struct Document {
    /// Line on which the document starts.
    pub line: u32,
    /// Tree of the document.
    pub root: Result<Node, SyntaxError>,
    /// Repeated keys: path, line, line of the first occurrence.
    pub duplicates: Vec<(String, u32, u32)>,
}

/// Error for a text that is not YAML or exceeds a limit.
#[derive(Debug)]
pub struct SyntaxError {
    /// Line, from 1.
    pub line: u32,
    /// Description of the error.
    pub message: String,
    /// Whether the text ended before the document was complete.
    pub cut_off: bool,
    /// Whether the document has an object of more than [`MAX_OBJECT`] bytes, or more than [`MAX_OBJECTS`] objects.
    pub too_large: bool,
    index: Option<usize>,
}

impl Node {
    /// Returns the value of a key, or `None` unless this is a mapping that has the key.
    pub fn get(&self, key: &str) -> Option<&Self> {
        let Value::Map(entries) = &self.value else { return None };
        entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
    }

    /// Returns the text, or `None` for another value.
    pub fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text, _) => Some(text),
            _ => None,
        }
    }

    /// Converts the tree to JSON. A number that JSON cannot express becomes `null`.
    pub fn to_json(&self) -> serde_json::Value {
        use serde_json::{Number, Value as Json};
        match &self.value {
            Value::Null => Json::Null,
            Value::Bool(truth) => Json::Bool(*truth),
            Value::Int(number) => Number::from_i128(*number).map_or(Json::Null, Json::Number),
            Value::Float(number) => Number::from_f64(*number).map_or(Json::Null, Json::Number),
            Value::Text(text, _) => Json::String(text.clone()),
            Value::List(nodes) => Json::Array(nodes.iter().map(Self::to_json).collect()),
            Value::Map(entries) => {
                Json::Object(entries.iter().map(|entry| (entry.key.clone(), entry.value.to_json())).collect())
            }
        }
    }
}

/// Appends a key to the path of a field.
pub fn join(path: &str, key: &str) -> String {
    let simple =
        !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-$".contains(&byte));
    match (path.is_empty(), simple) {
        (true, _) => key.to_owned(),
        (false, true) => format!("{path}.{key}"),
        (false, false) => format!("{path}[{key}]"),
    }
}

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for SyntaxError {}

/// Returns the documents of a text one by one; skips empty ones. Their size is not limited: a short text from others may
/// have gigabytes of aliases.
pub fn documents(text: &str) -> impl Iterator<Item = Document> {
    bounded(text, Limit::None)
}

/// Returns the first document of a text in a field of an object, such as an annotation; refuses one of more than
/// [`MAX_OBJECT`] bytes.
pub fn embedded(text: &str) -> Option<Document> {
    bounded(text, Limit::Document).next()
}

/// Returns the documents of a text like [`documents`], and refuses those with an object of more than [`MAX_OBJECT`]
/// bytes, or with more than [`MAX_OBJECTS`] objects. An object is a document, or an item of its list `items`.
pub fn objects(text: &str) -> impl Iterator<Item = Document> {
    bounded(text, Limit::Objects)
}

/// Returns the line of the document after the first `count` ones, or `None` if a text has no more. Does not parse, so
/// it costs little: it counts non-empty parts between `---` lines.
pub fn line_after(text: &str, count: usize) -> Option<u32> {
    contents(text).nth(count).map(|(before, _)| before + 1)
}

fn bounded(text: &str, limit: Limit) -> impl Iterator<Item = Document> {
    contents(text).flat_map(move |(line, chunk)| read(chunk, line, limit))
}

/// What may have at most [`MAX_OBJECT`] bytes.
#[derive(Clone, Copy, PartialEq)]
enum Limit {
    None,
    /// A document, or an item of its list `items`.
    Objects,
    /// A document.
    Document,
}

/// Reads the documents of a chunk one by one: `...` ends a document too.
fn read(chunk: &str, before: u32, limit: Limit) -> impl Iterator<Item = Document> {
    let mut parser = Parser::new_from_str(chunk);
    let mut tree = Tree::new(before, limit);
    let mut is_done = false;
    iter::from_fn(move || {
        while !is_done {
            let line = tree.start;
            match step(&mut parser, &mut tree) {
                Ok(Step::Continue) => {}
                Ok(Step::Document) => {
                    let done = std::mem::replace(&mut tree, Tree::new(before, limit));
                    if let Some(root) = done.root.filter(|root| root.value != Value::Null) {
                        return Some(Document { line, root: Ok(root), duplicates: done.duplicates });
                    }
                }
                Ok(Step::End) => is_done = true,
                Err(mut error) => {
                    is_done = true;
                    let end = chunk.trim_end().chars().count();
                    error.cut_off = error.index.is_some_and(|index| index >= end);
                    return Some(Document { line, root: Err(error), duplicates: Vec::new() });
                }
            }
        }
        None
    })
}

enum Step {
    Continue,
    Document,
    End,
}

/// A document under construction from the parser's events.
struct Tree {
    before: u32,
    start: u32,
    open: Vec<Open>,
    root: Option<Node>,
    anchors: HashMap<usize, Node>,
    nodes: usize,
    /// Size of the current object in bytes, as JSON, and its first line.
    object: (usize, u32),
    limit: Limit,
    duplicates: Vec<(String, u32, u32)>,
}

/// A list or mapping that is not yet closed.
struct Open {
    line: u32,
    anchor: usize,
    items: Items,
    /// Position of each key of a large mapping.
    index: HashMap<String, usize>,
}

enum Items {
    List(Vec<Node>),
    /// Entries, and the key that waits for its value.
    Map(Vec<Entry>, Option<(String, u32)>),
}

fn step<'a>(parser: &mut Parser<'a, StrInput<'a>>, tree: &mut Tree) -> Result<Step, SyntaxError> {
    let (event, span) = match parser.next_event() {
        None => return Ok(Step::End),
        Some(Err(error)) => return Err(tree.syntax(&error)),
        Some(Ok(event)) => event,
    };
    let line = tree.before + u32::try_from(span.start.line()).unwrap_or(u32::MAX);
    match event {
        Event::DocumentStart(..) => (tree.start, tree.object) = (line, (0, line)),
        Event::DocumentEnd => return Ok(Step::Document),
        Event::Scalar(text, style, anchor, _) => {
            tree.grow(SYNTAX + text.len(), line)?;
            let value = match style {
                ScalarStyle::Plain => plain(&text),
                _ => Value::Text(text.into_owned(), style == ScalarStyle::Literal),
            };
            tree.close(Node { line, value }, anchor)?;
        }
        Event::SequenceStart(_, anchor, _) => tree.open(line, anchor, Items::List(Vec::new()))?,
        Event::MappingStart(_, anchor, _) => tree.open(line, anchor, Items::Map(Vec::new(), None))?,
        Event::SequenceEnd | Event::MappingEnd => {
            if let Some(done) = tree.open.pop() {
                // Most lists and mappings are small, so their unused capacity would be most of the tree.
                let value = match done.items {
                    Items::List(mut nodes) => {
                        nodes.shrink_to_fit();
                        Value::List(nodes)
                    }
                    Items::Map(entries, _) => {
                        let mut entries = merge_keys(entries);
                        entries.shrink_to_fit();
                        Value::Map(entries)
                    }
                };
                tree.close(Node { line: done.line, value }, done.anchor)?;
            }
        }
        Event::Alias(anchor) => {
            let Some(node) = tree.anchors.get(&anchor) else {
                return Err(tree.error(line, "an alias (`*name`) without its anchor (`&name`)"));
            };
            // The node of an alias may contain expanded aliases, so its own depth counts as well.
            if tree.open.len() + depth(node) > MAX_DEPTH {
                return Err(tree.too_deep(line));
            }
            let node = node.clone();
            tree.nodes += count(&node);
            tree.grow(size(&node), line)?;
            tree.close(node, 0)?;
        }
        _ => {}
    }
    Ok(Step::Continue)
}

impl Tree {
    fn new(before: u32, limit: Limit) -> Self {
        Self {
            before,
            start: before + 1,
            open: Vec::new(),
            root: None,
            anchors: HashMap::new(),
            nodes: 0,
            object: (0, before + 1),
            limit,
            duplicates: Vec::new(),
        }
    }

    /// Adds to the size of the current object.
    fn grow(&mut self, size: usize, line: u32) -> Result<(), SyntaxError> {
        if self.limit == Limit::None {
            return Ok(());
        }
        if self.limit == Limit::Objects
            && let Some(items) = self.items()
        {
            if items >= MAX_OBJECTS {
                let message = format!("a list has more than {MAX_OBJECTS} objects");
                return Err(SyntaxError { too_large: true, ..self.error(line, message) });
            }
            self.object = (0, line);
        }
        self.object.0 += size;
        if self.object.0 <= MAX_OBJECT {
            return Ok(());
        }
        let message =
            format!("an object has more than {MAX_OBJECT} bytes as JSON; Kubernetes refuses such objects");
        Err(SyntaxError { too_large: true, ..self.error(self.object.1, message) })
    }

    /// Returns the number of objects so far if the next node is an object in a list of objects.
    fn items(&self) -> Option<usize> {
        let [Open { items: Items::Map(_, Some((key, _))), .. }, Open { items: Items::List(nodes), .. }] =
            &self.open[..]
        else {
            return None;
        };
        (key == ITEMS).then_some(nodes.len())
    }

    fn open(&mut self, line: u32, anchor: usize, items: Items) -> Result<(), SyntaxError> {
        if self.open.len() >= MAX_DEPTH {
            return Err(self.too_deep(line));
        }
        self.grow(SYNTAX, line)?;
        self.open.push(Open { line, anchor, items, index: HashMap::new() });
        Ok(())
    }

    /// Adds a complete node to the innermost open list or mapping.
    fn close(&mut self, node: Node, anchor: usize) -> Result<(), SyntaxError> {
        // A node with an anchor is stored twice, so its content counts again.
        self.nodes += if anchor > 0 { count(&node) } else { 1 };
        if self.nodes > MAX_NODES {
            return Err(self.error(node.line, format!("more than {MAX_NODES} values in one document")));
        }
        if anchor > 0 {
            if self.anchors.len() >= MAX_ANCHORS {
                return Err(self.error(node.line, format!("more than {MAX_ANCHORS} anchors in one document")));
            }
            self.anchors.insert(anchor, node.clone());
        }
        let mut repeated = None;
        let Some(Open { items, index, .. }) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        match items {
            Items::List(nodes) => nodes.push(node),
            Items::Map(_, key @ None) => {
                let line = node.line;
                let Some(text) = key_text(node.value) else {
                    return Err(self.error(line, "a mapping's key must be plain text"));
                };
                *key = Some((text, line));
            }
            Items::Map(entries, key) => {
                let Some((key, line)) = key.take() else { return Ok(()) };
                if entries.len() >= MAX_KEYS {
                    return Err(self.error(line, format!("more than {MAX_KEYS} keys in one mapping")));
                }
                let found = if entries.len() < INDEXED_KEYS {
                    entries.iter().position(|entry| entry.key == key)
                } else {
                    if index.is_empty() {
                        index.extend(entries.iter().enumerate().map(|(at, entry)| (entry.key.clone(), at)));
                    }
                    index.get(&key).copied()
                };
                match found.filter(|_| key != "<<").and_then(|at| entries.get(at)) {
                    Some(first) => repeated = Some((key, line, first.line)),
                    None => {
                        if entries.len() >= INDEXED_KEYS {
                            index.insert(key.clone(), entries.len());
                        }
                        entries.push(Entry { key, line, value: node });
                    }
                }
            }
        }
        if let Some((key, line, first)) = repeated.filter(|_| self.duplicates.len() < MAX_DUPLICATES) {
            let path = join(&self.path(), &key);
            self.duplicates.push((path, line, first));
        }
        Ok(())
    }

    /// Returns the path of the innermost open list or mapping, for messages.
    fn path(&self) -> String {
        let mut path = String::new();
        // The innermost list or mapping is skipped, because the ones around it contain its key or index.
        for open in self.open.iter().rev().skip(1).rev() {
            match &open.items {
                Items::List(nodes) => path.push_str(&format!("[{}]", nodes.len())),
                Items::Map(_, key) => path = join(&path, key.as_ref().map_or("", |(key, _)| key)),
            }
        }
        path
    }

    fn syntax(&self, error: &ScanError) -> SyntaxError {
        let line = u32::try_from(error.marker().line()).unwrap_or(u32::MAX);
        let message = format!("not valid YAML: {} (column {})", error.info(), error.marker().col() + 1);
        SyntaxError {
            line: self.before + line,
            message,
            cut_off: false,
            too_large: false,
            index: Some(error.marker().index()),
        }
    }

    fn too_deep(&self, line: u32) -> SyntaxError {
        self.error(line, format!("lists and mappings nested more than {MAX_DEPTH} deep"))
    }

    fn error(&self, line: u32, message: impl Into<String>) -> SyntaxError {
        SyntaxError { line, message: message.into(), cut_off: false, too_large: false, index: None }
    }
}

fn count(node: &Node) -> usize {
    1 + match &node.value {
        Value::List(nodes) => nodes.iter().map(count).sum(),
        Value::Map(entries) => entries.iter().map(|entry| count(&entry.value)).sum::<usize>(),
        _ => 0,
    }
}

/// Returns the size of a node in bytes, as JSON.
fn size(node: &Node) -> usize {
    SYNTAX
        + match &node.value {
            Value::List(nodes) => nodes.iter().map(size).sum(),
            Value::Map(entries) => {
                entries.iter().map(|entry| SYNTAX + entry.key.len() + size(&entry.value)).sum()
            }
            Value::Text(text, _) => text.len(),
            // About the length of a number.
            _ => 4,
        }
}

/// Returns the nesting depth of lists and mappings.
fn depth(node: &Node) -> usize {
    match &node.value {
        Value::List(nodes) => 1 + nodes.iter().map(depth).max().unwrap_or(0),
        Value::Map(entries) => 1 + entries.iter().map(|entry| depth(&entry.value)).max().unwrap_or(0),
        _ => 0,
    }
}

fn key_text(value: Value) -> Option<String> {
    Some(match value {
        Value::Text(text, _) => text,
        Value::Int(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Bool(truth) => truth.to_string(),
        Value::Null | Value::List(_) | Value::Map(_) => return None,
    })
}

/// Expands merge keys (`<<: *defaults`): adds the entries that the mapping does not have itself.
fn merge_keys(entries: Vec<Entry>) -> Vec<Entry> {
    if entries.iter().all(|entry| entry.key != "<<") {
        return entries;
    }
    let (merges, mut own): (Vec<_>, Vec<_>) = entries.into_iter().partition(|entry| entry.key == "<<");
    let mut maps = Vec::new();
    for merge in merges {
        match merge.value.value {
            Value::List(nodes) => maps.extend(nodes),
            value => maps.push(Node { line: merge.line, value }),
        }
    }
    for map in maps {
        if let Value::Map(entries) = map.value {
            for entry in entries {
                if own.iter().all(|known| known.key != entry.key) {
                    own.push(entry);
                }
            }
        }
    }
    own
}

/// Returns the value of a plain scalar, with the type that it has in YAML 1.1. Exceptions: `y`, `n`, binary numbers,
/// numbers with `_` or `:`, `.inf` and `.nan` are text.
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => return Value::Bool(true),
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => {
            return Value::Bool(false);
        }
        _ => {}
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    let radix = |prefix: &str, radix| {
        // The sign precedes the prefix. Without this check, the number parser would accept a second sign
        // after the prefix.
        let number = digits.strip_prefix(prefix).filter(|number| !number.starts_with(['-', '+']));
        number.and_then(|number| i128::from_str_radix(number, radix).ok())
    };
    // In YAML 1.1, a leading 0 marks an octal number, as in file modes.
    if let Some(number) = radix("0x", 16).or_else(|| radix("0o", 8)).or_else(|| radix("0", 8)) {
        return Value::Int(if text.starts_with('-') { -number } else { number });
    }
    let begins = digits.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    if digits.bytes().all(|byte| byte.is_ascii_digit())
        && let Ok(number) = text.parse()
    {
        return Value::Int(number);
    }
    if begins && let Ok(number) = text.parse() {
        return Value::Float(number);
    }
    Value::Text(text.to_owned(), false)
}

#[cfg(test)]
mod tests;
