//! Broken input to a running mesh: each mistake is reported with file and line, and the mesh keeps its last valid
//! state.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{fs, path::Path};

use skysail_testkit::{Mesh, Setup};

const STOCK: &str = "http://stock.shop/";

/// Some of the mistakes of `tests/mistakes`, where each file has its messages beside it.
const CORPUS: [&str; 10] = [
    "bad-regex",
    "clashing-ports",
    "cut-off-block",
    "cut-off-flow",
    "duplicate-key",
    "hosts",
    "missing-subset",
    "no-kind-no-name",
    "policies",
    "two-virtual-services",
];

#[test]
fn broken_files_do_not_interrupt_the_mesh() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), include_str!("shop.yaml")).ready();
    mesh.wait_status("front", STOCK, &[], 200);
    let load = mesh.load("front", &[STOCK, "-c", "4", "--rate", "300", "--count", "x-version"]);
    load.wait_more(50);
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/mistakes");
    for name in CORPUS {
        let file = format!("{name}.yaml");
        mesh.put(&file, &fs::read_to_string(corpus.join(&file)).unwrap());
        let output = fs::read_to_string(corpus.join(format!("{name}.txt"))).unwrap();
        // FILE:LINE: severity: OBJECT: FIELD: …
        let errors = output.lines().filter(|line| line.contains(": error: "));
        for (place, message) in errors.filter_map(|line| line.split_once(": error: ")) {
            let about = message.split([':', ';']).next().unwrap();
            mesh.wait(&format!("{place} is reported, about {about}"), |text| {
                let is_reported = text.lines().any(|line| line.contains(&format!("/{place}: {about}")));
                if is_reported { Ok(()) } else { Err(text.to_owned()) }
            });
        }
        load.wait_more(50);
        remove(&mesh, &file);
    }
    spoil(&mesh);
    let report = load.finish();
    report.assert_all_good();
    assert_eq!(report.count("v1"), report.answered, "{report:?}");
    let ended = mesh.interrupt();
    assert!(ended.status.success(), "{ended:?}");
}

/// Removes a file and waits for the line that there are no errors.
fn remove(mesh: &Mesh, file: &str) {
    let before = mesh.output().matches(IN_ORDER).count();
    fs::remove_file(mesh.config().join(file)).unwrap();
    mesh.wait("the message is cleared", |text| {
        if text.matches(IN_ORDER).count() > before { Ok(()) } else { Err(text.to_owned()) }
    });
}

const IN_ORDER: &str = "the configuration has no errors or warnings any more";

/// Breaks the mesh's own file: its objects stay as they were.
fn spoil(mesh: &Mesh) {
    let whole = fs::read_to_string(mesh.config().join("mesh.yaml")).unwrap();
    let spoiled = [
        // Cut off within the routes.
        whole[..whole.rfind("weight: 0").unwrap() + 4].to_owned(),
        // An invalid value, beside a change that would otherwise take effect.
        whole.replace("weight: 100", "weight: much").replace("weight: 0", "weight: 100"),
        // An empty file.
        "{".to_owned(),
    ];
    for text in spoiled {
        let before = mesh.output().len();
        mesh.put("mesh.yaml", &text);
        mesh.wait("the spoiled file is reported", |output| {
            let new = &output[before..];
            if new.contains("error: ") && new.contains("mesh.yaml:") { Ok(()) } else { Err(new.to_owned()) }
        });
        let before = mesh.output().matches(IN_ORDER).count();
        mesh.wait_status("front", STOCK, &[], 200);
        mesh.put("mesh.yaml", &whole);
        mesh.wait("the message is cleared", |output| {
            if output.matches(IN_ORDER).count() > before { Ok(()) } else { Err(output.to_owned()) }
        });
    }
}
