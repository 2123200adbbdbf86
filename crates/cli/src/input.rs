//! The paths that `skysail up` is given: folders, files, and `-` for standard input.

use std::{
    fs,
    io::{self, IsTerminal as _, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use skysail_sandbox::{MAX_FILE, refuse_templates};

/// Stands for standard input among the paths.
const STDIN: &str = "-";
/// The file that standard input is written to, in a folder of the mesh's that holds nothing else: it is watched.
const FILE: &str = "input/stdin.yaml";

/// Where the configuration comes from.
#[derive(Debug)]
pub(crate) struct Input {
    /// As typed in.
    paths: Vec<PathBuf>,
    text: Option<String>,
}

impl Input {
    /// Looks at the paths, and reads standard input if it is among them.
    pub(crate) fn read(paths: Vec<PathBuf>) -> anyhow::Result<Self> {
        for path in paths.iter().filter(|path| !is_stdin(path)) {
            fs::metadata(path).with_context(|| format!("no such folder or file: {}", path.display()))?;
        }
        refuse_templates(&paths)?;
        let text = match paths.iter().filter(|path| is_stdin(path)).count() {
            0 => None,
            1 if io::stdin().is_terminal() => bail!(
                "standard input is a terminal: pipe YAML into it, as in `kustomize build DIR | skysail up -`"
            ),
            1 => Some(text(io::stdin().lock())?),
            _ => bail!("standard input (-) is given more than once"),
        };
        Ok(Self { paths, text })
    }

    /// The mesh's name if none is given: the first path's, without what a name may not hold.
    pub(crate) fn mesh_name(&self) -> String {
        let first = self.paths.iter().find(|path| !is_stdin(path)).and_then(|path| path.canonicalize().ok());
        let name = first.as_deref().and_then(Path::file_stem).unwrap_or_default().to_string_lossy();
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        if name.is_empty() { "mesh".to_owned() } else { name }
    }

    /// The absolute paths to run. Standard input is written to a file in the mesh's folder.
    pub(crate) fn place(&self, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let place = |path: &PathBuf| match &self.text {
            Some(text) if is_stdin(path) => {
                let file = folder.join(FILE);
                fs::create_dir_all(folder.join("input")).context("making a folder for standard input")?;
                fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
                Ok(file)
            }
            _ => path.canonicalize().with_context(|| format!("no such folder or file: {}", path.display())),
        };
        self.paths.iter().map(place).collect()
    }

    /// A text in which the file of standard input has a name that outlives the file.
    pub(crate) fn named(&self, text: &str, folder: &Path) -> String {
        match &self.text {
            Some(_) => text.replace(&*folder.join(FILE).to_string_lossy(), "<stdin>"),
            None => text.to_owned(),
        }
    }
}

fn is_stdin(path: &Path) -> bool {
    path.as_os_str() == STDIN
}

/// Reads a text, of at most the size that files may have.
fn text(from: impl Read) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_FILE + 1).read_to_end(&mut bytes).context("reading standard input")?;
    if bytes.len() as u64 > MAX_FILE {
        bail!(
            "standard input has more than {} MiB, which is the limit: pass its parts as files",
            MAX_FILE >> 20
        );
    }
    let text = String::from_utf8(bytes).context("standard input is not UTF-8, as YAML must be")?;
    if text.trim().is_empty() {
        bail!("standard input is empty: did the command before the pipe fail?");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_input_is_bounded_and_must_hold_a_text() {
        let said = |bytes: &[u8]| text(bytes).map_err(|error| error.to_string());
        assert_eq!(said(b"kind: Pod\n"), Ok("kind: Pod\n".to_owned()));
        assert!(said(b" \n\n").unwrap_err().contains("is empty"));
        assert!(said(b"\xff").unwrap_err().contains("UTF-8"));
        let endless = text(io::repeat(b'x')).unwrap_err().to_string();
        assert!(endless.contains("more than 32 MiB"), "{endless}");
    }

    #[test]
    fn the_name_of_the_mesh_follows_from_the_first_path() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("my shop.yaml");
        fs::write(&file, "").unwrap();
        let name = |paths: &[&Path]| {
            let paths = paths.iter().map(|path| (*path).to_owned()).collect();
            Input { paths, text: Some(String::new()) }.mesh_name()
        };
        assert_eq!(name(&[&file]), "my-shop");
        assert_eq!(name(&[Path::new(STDIN)]), "mesh");
        assert_eq!(name(&[Path::new(STDIN), &file]), "my-shop");
    }

    #[test]
    fn standard_input_becomes_a_file_of_the_mesh() {
        let folder = tempfile::tempdir().unwrap();
        let input =
            Input { paths: vec![STDIN.into(), folder.path().to_owned()], text: Some("a: b".to_owned()) };
        let paths = input.place(folder.path()).unwrap();
        assert_eq!(fs::read_to_string(&paths[0]).unwrap(), "a: b");
        let text = format!("error: {}:3: x", paths[0].display());
        assert_eq!(input.named(&text, folder.path()), "error: <stdin>:3: x");
    }
}
