//! Programs that tests make.

use std::{fs, path::Path, process::Command};

/// Copies a file and makes the copy executable.
///
/// Another process writes the copy. If this process did, a child that another thread starts in the meantime would
/// inherit the file open for writing, and the kernel does not execute such a file (`ETXTBSY`).
pub fn install(file: &Path, program: &Path) {
    let status = Command::new("install").args(["-m", "755"]).args([file, program]).status().unwrap();
    assert!(status.success(), "{} cannot be installed: {status}", program.display());
}

/// Makes a program of the text of a script.
pub fn script(program: &Path, text: &str) {
    let source = program.with_added_extension("text");
    fs::write(&source, text).unwrap();
    install(&source, program);
}
