//! What documents name exists: the threat model's tests.

use std::{fs, path::Path};

/// The project's folder.
const PROJECT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

#[test]
fn the_threat_model_names_tests_that_exist() {
    let text = fs::read_to_string(Path::new(PROJECT).join("docs/threat-model.md")).unwrap();
    // Every second part stands between backquotes.
    let named: Vec<_> = text.split('`').skip(1).step_by(2).filter(|name| name.contains(".rs")).collect();
    assert!(named.len() > 30, "{named:?}");
    let missing: Vec<_> = named.iter().filter(|name| !exists(name)).collect();
    assert!(missing.is_empty(), "docs/threat-model.md names tests that are not there: {missing:#?}");
}

/// Whether a file exists (`proxy/tests/limits.rs`), and in it the function (`::name`) if one is named. The document leaves
/// `crates/` out.
fn exists(named: &str) -> bool {
    let (file, function) = named.split_once("::").map_or((named, None), |(file, name)| (file, Some(name)));
    let paths = [Path::new(PROJECT).join(file), Path::new(PROJECT).join("crates").join(file)];
    let Some(text) = paths.iter().find_map(|path| fs::read_to_string(path).ok()) else { return false };
    function.is_none_or(|name| text.contains(&format!("fn {name}(")))
}
