//! Each supported field has tests. The tests exist and are about the field.

use std::{collections::BTreeMap, fs, path::Path};

use skysail_model::fields::{FieldRow, KindFields, Support, kinds};

/// The project's folder.
const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// Folders whose YAML files a test may name.
const FOLDERS: [&str; 3] = ["examples/", "tests/", "docs/"];

/// Texts of test files, with the configuration that each uses.
#[derive(Default)]
struct Sources(BTreeMap<String, Option<(String, String)>>);

impl Sources {
    /// Returns the code of a test file, and the code with its configuration. `name` is its path below `tests`.
    fn of(&mut self, name: &str) -> Option<&(String, String)> {
        let read = || {
            let path = Path::new(PROJECT).join("tests").join(format!("{name}.rs"));
            let code = fs::read_to_string(&path).ok()?;
            let mut all = code.clone();
            let quoted = code.split('"').skip(1).step_by(2);
            let folder = path.parent()?;
            for name in quoted {
                let below = FOLDERS.iter().find_map(|folder| name.find(folder).map(|at| &name[at..]));
                add(&folder.join(name), &mut all);
                // Examples of tasks are named alone.
                add(&Path::new(PROJECT).join("examples/tasks").join(name), &mut all);
                below.into_iter().for_each(|below| add(&Path::new(PROJECT).join(below), &mut all));
            }
            Some((code, all))
        };
        self.0.entry(name.to_owned()).or_insert_with(read).as_ref()
    }
}

/// Adds the text of a file of configuration, or of those of a folder.
fn add(path: &Path, text: &mut String) {
    let is_text = path.extension().is_some_and(|end| end == "yaml" || end == "md");
    if is_text && let Ok(more) = fs::read_to_string(path) {
        text.push_str(&more);
    }
    if path.file_name().is_some() && path.is_dir() {
        let files = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        files
            .filter(|file| file.extension().is_some_and(|end| end == "yaml"))
            .for_each(|file| add(&file, text));
    }
}

/// Returns whether a text has a word that is not part of a longer one.
fn has_word(text: &str, word: &str) -> bool {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.match_indices(word).any(|(at, _)| {
        !is_part(text[..at].chars().next_back()) && !is_part(text[at + word.len()..].chars().next())
    })
}

/// Returns the words that a test of a field must have: the kind, and the last part of the field's path or value.
fn words<'a>(kind: &'a KindFields, field: &FieldRow) -> [&'a str; 2]
where
    'static: 'a,
{
    let last = field.path.rsplit('.').find(|part| *part != "*").unwrap_or(field.path);
    let word =
        field.value.map_or(last, |value| value.split('[').next().unwrap_or(value).trim_end_matches(".NAME"));
    let of = match kind.name {
        "MeshConfig" => "istio-system",
        "MeshNetworks" => "meshNetworks",
        "Gateway of Gateway API" => "gateway.networking.k8s.io",
        name => name,
    };
    [of, word]
}

#[test]
fn tests_of_fields_exist_and_set_them() {
    let (mut sources, mut wrong) = (Sources::default(), Vec::new());
    for kind in kinds() {
        for field in &kind.fields {
            for test in &field.tests {
                let name = format!("{}.txt: {}: {test}", kind.name, field.path);
                let Some((code, all)) = test.rsplit_once("::").and_then(|(file, _)| sources.of(file)) else {
                    wrong.push(format!("{name}: there is no such file"));
                    continue;
                };
                let function = test.rsplit("::").next().unwrap_or_default();
                if !code.contains(&format!("#[test]\nfn {function}(")) {
                    wrong.push(format!("{name}: there is no such test"));
                }
                let missing = words(kind, field).into_iter().filter(|word| !has_word(all, word));
                wrong.extend(missing.map(|word| format!("{name}: does not have {word:?}")));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_supported_field_has_a_test() {
    let mut missing = Vec::new();
    for kind in kinds() {
        let works = |field: &&FieldRow| {
            !matches!(field.support, Support::Warned | Support::Refused | Support::Unread)
                && field.tests.is_empty()
        };
        missing
            .extend(kind.fields.iter().filter(works).map(|field| format!("{}: {}", kind.name, field.path)));
    }
    assert!(missing.is_empty(), "no test is named for {missing:#?}");
}
