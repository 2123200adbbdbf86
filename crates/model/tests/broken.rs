//! Broken input is refused with a message a user can act on, and takes nothing else with it.
//!
//! Each `broken/NAME.yaml` has a `broken/NAME.txt` beside it: what is said of it, then the objects that are taken.
//! `UPDATE=1 cargo test -p skysail-model --test broken` writes those files anew; read them before you commit.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{env, fmt::Write as _, fs, path::Path};

use skysail_model::{Severity, World, parse};

/// What is said of a text, and the objects taken from it.
fn report(text: &str, file: &str) -> String {
    let mut world = World::new();
    let parsed = parse(text, file);
    let mut said: Vec<_> = parsed.diagnostics;
    let mut taken = String::new();
    for (object, origin) in parsed.objects {
        writeln!(taken, "taken: {}", object.key()).unwrap();
        world.apply(object, origin);
    }
    said.extend(world.validate());
    said.retain(|said| said.severity != Severity::Info);
    said.iter().fold(String::new(), |all, said| format!("{all}{said}\n")) + &taken
}

#[test]
fn every_broken_input_gets_its_message() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broken");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|end| end == "yaml"));
    files.sort();
    assert!(files.len() >= 20, "{} inputs", files.len());
    let mut wrong = Vec::new();
    for file in files {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let found = report(&fs::read_to_string(&file).unwrap(), &name);
        let beside = file.with_extension("txt");
        if env::var_os("UPDATE").is_some() {
            fs::write(&beside, &found).unwrap();
        }
        let expected = fs::read_to_string(&beside).unwrap_or_default();
        if found != expected {
            wrong.push(format!("--- {name}: expected\n{expected}--- found\n{found}"));
        }
        assert!(
            found.contains(": error: ") || found.contains(": warning: "),
            "{name} is not broken:\n{found}"
        );
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
