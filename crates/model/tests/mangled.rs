//! Parsing any text ends without a panic, and a World accepts the result.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{fs, path::Path};

use proptest::prelude::*;
use skysail_model::{World, parse};

/// Returns valid files to mutate.
fn seeds() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files: Vec<_> =
        fs::read_dir(root.join("../../tests/mistakes")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.push(root.join("../../tests/istiod/o-virtualservice-features/10-virtualservices.yaml"));
    files.push(root.join("../../tests/istiod/n-destinationrule-policies/10-destinationrules.yaml"));
    files.retain(|file| file.extension().is_some_and(|end| end == "yaml"));
    files.sort();
    files.iter().map(|file| fs::read_to_string(file).unwrap()).collect()
}

/// Removes and inserts text at any character.
#[derive(Clone, Debug)]
struct Edit {
    at: prop::sample::Index,
    cut: usize,
    put: String,
}

fn edit() -> impl Strategy<Value = Edit> {
    let put = prop_oneof![
        "[ -~\n\t]{0,6}",
        prop::sample::select(vec![
            "\n", ": ", "- ", "{", "[", "&a ", "*a", "<<: *a", "---\n", "|", "\"", "~", "!!x ", "\u{feff}",
            "é"
        ])
        .prop_map(ToOwned::to_owned),
    ];
    (any::<prop::sample::Index>(), 0usize..12, put).prop_map(|(at, cut, put)| Edit { at, cut, put })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_never_panic(seed in prop::sample::select(seeds()), edits in prop::collection::vec(edit(), 1..6)) {
        let mut text: Vec<char> = seed.chars().collect();
        for edit in edits {
            let at = edit.at.index(text.len() + 1);
            let end = (at + edit.cut).min(text.len());
            text.splice(at..end, edit.put.chars());
        }
        take(&text.into_iter().collect::<String>());
    }

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC*") {
        take(&text);
    }
}

fn take(text: &str) {
    let parsed = parse(text, "spoiled.yaml");
    let lines = u32::try_from(text.lines().count()).unwrap() + 2;
    for finding in &parsed.diagnostics {
        assert!(finding.line <= lines && !finding.message.is_empty(), "{finding}");
    }
    let mut world = World::new();
    for (object, origin) in parsed.objects {
        world.apply(object, origin);
    }
    world.validate();
}
