//! The dynamic loader and the libraries of a program.
//!
//! The program's own loader lists them, as `ldd` does: it alone knows where it finds them. The loader runs this way, so the
//! program must be one of this machine's architecture, and a trusted one.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail, ensure};
use object::{
    Endianness, elf,
    read::elf::{ElfFile64, FileHeader as _, ProgramHeader as _},
};

/// Libraries: the path in an image, without a leading slash, and the file on this machine.
pub(super) type Libraries = BTreeMap<String, PathBuf>;

/// The C library. Its folder is one that the loader searches without a cache.
const C_LIBRARY: &str = "libc.so.6";

/// Returns the architecture of a program, in OCI's words, and its loader and libraries. A static program has none.
pub(super) fn needed(file: &Path, program: &[u8]) -> anyhow::Result<(&'static str, Libraries)> {
    let shown = file.display();
    let parsed = ElfFile64::<Endianness>::parse(program)
        .with_context(|| format!("{shown} is no 64-bit Linux program"))?;
    let endian = parsed.endian();
    let architecture = match parsed.elf_header().e_machine(endian) {
        elf::EM_X86_64 => "amd64",
        elf::EM_AARCH64 => "arm64",
        other => bail!("{shown} is for the machine {other:?}, and not for x86-64 or AArch64"),
    };
    let mut loader = None;
    for header in parsed.elf_program_headers() {
        loader = loader.or(header.interpreter(endian, program)?);
    }
    let Some(loader) = loader else { return Ok((architecture, Libraries::new())) };
    let loader = std::str::from_utf8(loader).with_context(|| format!("the loader of {shown}"))?;
    // Variables such as LD_PRELOAD would add libraries.
    let output = Command::new(loader).arg("--list").arg(file).env_clear().output();
    let output = output.with_context(|| format!("{shown}: its loader {loader} cannot run here"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{shown}: {loader} --list failed: {}", errors.trim());
    let mut libraries =
        listed(&String::from_utf8_lossy(&output.stdout)).with_context(|| shown.to_string())?;
    libraries.insert(relative(loader), loader.into());
    Ok((architecture, libraries))
}

/// Returns the libraries in the output of a loader.
fn listed(output: &str) -> anyhow::Result<Libraries> {
    let mut found = Vec::new();
    for line in output.lines() {
        // The kernel's library and the loader itself have no arrow.
        let Some((name, place)) = line.trim().split_once(" => ") else { continue };
        ensure!(place != "not found", "the library {name} is not on this machine");
        let file = place.rsplit_once(" (").map_or(place, |(file, _)| file);
        found.push((name.to_owned(), PathBuf::from(file)));
    }
    let c_library = found.iter().find(|(name, _)| name == C_LIBRARY).and_then(|(_, file)| file.parent());
    let folder = c_library.and_then(Path::to_str).context("the program does not load the C library")?;
    let folder = relative(folder);
    Ok(found.into_iter().map(|(name, file)| (format!("{folder}/{name}"), file)).collect())
}

fn relative(path: &str) -> String {
    path.trim_start_matches('/').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_libraries_are_in_the_folder_of_the_c_library() {
        let output = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibstdc++.so.6 => /opt/lib/libstdc++.so.6 (0x00007f01)\n\
            \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f02)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f03)\n";
        let libraries = listed(output).unwrap();
        let files: Vec<_> =
            libraries.iter().map(|(path, file)| (path.as_str(), file.to_str().unwrap())).collect();
        assert_eq!(
            files,
            [
                ("lib/x86_64-linux-gnu/libc.so.6", "/lib/x86_64-linux-gnu/libc.so.6"),
                ("lib/x86_64-linux-gnu/libstdc++.so.6", "/opt/lib/libstdc++.so.6"),
            ]
        );
        let missing = listed("\tlibnone.so => not found\n").unwrap_err();
        assert!(missing.to_string().contains("libnone.so is not on this machine"), "{missing}");
    }
}
