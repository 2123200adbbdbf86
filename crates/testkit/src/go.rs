//! Programs in Go that tests run.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

/// Builds the program in `tests/NAME` and returns its path. `manifest` is the folder of the test's crate, two folders
/// below that of the project. `temporary` is its folder for temporary files.
///
/// # Panics
/// Go is not installed, or a module of the program was not fetched.
pub fn go_program(manifest: &Path, name: &str, temporary: &Path) -> PathBuf {
    let program = temporary.join(format!("go-{name}"));
    let source = manifest.join("../../tests").join(name);
    let build = Command::new("go").args(["build", "-o"]).arg(&program).current_dir(source).status();
    assert!(
        build.is_ok(),
        "this test builds a program in Go, and go does not start ({build:?}): run ./test.sh"
    );
    let built = build.is_ok_and(|status| status.success());
    assert!(built, "tests/{name} could not be built; it needs the Go module proxy (GOPROXY), once");
    program
}
