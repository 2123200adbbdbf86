//! Reads the table of tests of Istio's analyzers, `pkg/config/analysis/analyzers/analyzers_test.go`.
//!
//! The table is a composite literal of Go. Only its nesting, its field names and its strings matter:
//! `{name: "…", inputFiles: []string{"…"}, expected: []message{{msg.X, "KIND NAMESPACE/NAME"}}}`.

/// Line before the first case.
const TABLE: &str = "var testGrid = []testCase";

/// One case of the table.
#[derive(Debug, Default)]
pub(crate) struct GoCase {
    pub(crate) name: String,
    /// Analyzer that the case runs, such as `gateway.SecretAnalyzer`.
    pub(crate) analyzer: String,
    /// Paths of the files with objects, relative to the table.
    pub(crate) files: Vec<String>,
    /// Path of the mesh configuration; empty for the defaults.
    pub(crate) mesh_config: String,
    /// Path of the networks of the mesh; empty for none.
    pub(crate) mesh_networks: String,
    pub(crate) expected: Vec<GoMessage>,
}

impl GoCase {
    /// Returns the name of its first file. Several cases have the same name.
    pub(crate) fn file(&self) -> &str {
        self.files.first().map_or("", |file| file.trim_start_matches("testdata/"))
    }
}

/// A message that an analyzer writes.
#[derive(Debug)]
pub(crate) struct GoMessage {
    /// Name of its type, such as `ReferencedResourceNotFound`.
    pub(crate) name: String,
    /// Object that it is about, as `KIND NAMESPACE/NAME`.
    pub(crate) object: String,
}

/// Returns the cases of the table.
///
/// # Panics
/// Panics if the text has no table, or one of another form.
pub(crate) fn cases(text: &str) -> Vec<GoCase> {
    let (_, table) = text.split_once(TABLE).unwrap();
    let mut cases: Vec<GoCase> = Vec::new();
    let (mut depth, mut field, mut word) = (0, String::new(), String::new());
    for token in tokens(table) {
        match token {
            Token::Open => {
                depth += 1;
                if depth == 2 {
                    cases.push(GoCase::default());
                    field.clear();
                }
            }
            Token::Close if depth == 1 => break,
            Token::Close => depth -= 1,
            Token::Colon => {
                assert_eq!(depth, 2, "field {word} of a case");
                field = std::mem::take(&mut word);
            }
            Token::Word(next) => {
                let case = cases.last_mut().filter(|case| depth == 2 && case.analyzer.is_empty());
                match case.filter(|_| field == "analyzer") {
                    Some(case) => case.analyzer = next,
                    None => word = next,
                }
            }
            Token::Text(text) => {
                let case = cases.last_mut().unwrap();
                match (field.as_str(), depth) {
                    ("name", 2) => case.name = text,
                    ("meshConfigFile", 2) => case.mesh_config = text,
                    ("meshNetworksFile", 2) => case.mesh_networks = text,
                    ("inputFiles", 3) => case.files.push(text),
                    ("expected", 4) => {
                        let name = word.strip_prefix("msg.").unwrap().to_owned();
                        case.expected.push(GoMessage { name, object: text });
                    }
                    place => assert_eq!(place, ("", 0), "unknown text {text:?} in {case:?}"),
                }
            }
        }
    }
    cases
}

/// Part of a text in Go. Other parts, such as commas and parentheses, are left out.
enum Token {
    Open,
    Close,
    Colon,
    /// Identifier, with the package before it.
    Word(String),
    /// Content of a string. The table has no escapes.
    Text(String),
}

fn tokens(text: &str) -> impl Iterator<Item = Token> {
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            let first = rest.chars().next()?;
            let is_word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.');
            // Length of the token, and the token itself. None for what is left out.
            let (length, token) = match first {
                '{' => (1, Some(Token::Open)),
                '}' => (1, Some(Token::Close)),
                ':' => (1, Some(Token::Colon)),
                '"' => {
                    let (content, _) = rest[1..].split_once('"')?;
                    (content.len() + 2, Some(Token::Text(content.to_owned())))
                }
                '/' if rest.starts_with("//") => (rest.find('\n').unwrap_or(rest.len()), None),
                _ if is_word(first) => {
                    let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                    (length, Some(Token::Word(rest[..length].to_owned())))
                }
                _ => (first.len_utf8(), None),
            };
            rest = &rest[length..];
            if token.is_some() {
                return token;
            }
        }
    })
}
