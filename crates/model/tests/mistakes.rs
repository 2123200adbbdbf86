//! Common mistakes in configuration and their diagnostics. A mistake refuses no other object.
//!
//! Each `tests/mistakes/NAME.yaml` has a `NAME.txt` beside it: the messages, then the objects that take effect.
//! `UPDATE=1 cargo test -p skysail-model --test mistakes` writes those files; read them before you commit.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{env, fmt::Write as _, fs, path::Path};

use skysail_model::{Files, World, parse};

/// Returns the diagnostics of a file, as the control plane reports them, and the accepted objects.
fn report(text: &str, name: &str) -> String {
    let (mut world, mut files) = (World::new(), Files::new());
    let parsed = parse(text, name);
    let taken: Vec<_> = parsed.objects.iter().map(|(object, _)| object.key()).collect();
    for change in files.take(0, name, parsed) {
        change.apply_to(&mut world);
    }
    let mut report = String::new();
    for message in files.diagnostics().into_iter().chain(world.validate()) {
        writeln!(report, "{message}").unwrap();
    }
    for key in taken {
        writeln!(report, "taken: {key}").unwrap();
    }
    report
}

#[test]
fn every_mistake_has_its_diagnostics() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/mistakes");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|end| end == "yaml"));
    files.sort();
    assert!(files.len() >= 100, "{} mistakes", files.len());
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
        if !found.contains(": error: ") && !found.contains(": warning: ") && !found.contains(": info: ") {
            wrong.push(format!("--- {name}: no message\n{found}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
