//! Paths of `skysail up`: folders, files, and `-` for standard input.

use std::{
    fs,
    io::{self, IsTerminal as _, Read},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use skysail_sandbox::{MAX_FILE, refuse_templates};

/// Name of standard input among the paths.
const STDIN: &str = "-";
/// Name of standard input in messages.
const STDIN_NAME: &str = "standard input";
/// Folder and file in the mesh's folder for standard input. The folder is watched, so it contains nothing else.
const FOLDER: &str = "input";
const FILE: &str = "input/stdin.yaml";

/// Source of the configuration.
#[derive(Debug)]
pub(crate) struct Input {
    /// Absolute paths.
    pub(crate) paths: Vec<PathBuf>,
    /// Content of standard input, which is the last layer.
    pub(crate) text: Option<String>,
}

impl Input {
    /// Checks the paths, and reads standard input if it is among them.
    pub(crate) fn read(paths: Vec<PathBuf>) -> anyhow::Result<Self> {
        let (stdin, paths): (Vec<PathBuf>, Vec<PathBuf>) =
            paths.into_iter().partition(|path| path.as_os_str() == STDIN);
        for path in &paths {
            fs::metadata(path).with_context(|| format!("no such folder or file: {}", path.display()))?;
        }
        refuse_templates(&paths)?;
        let text = match stdin.len() {
            0 => None,
            1 if io::stdin().is_terminal() => bail!(
                "standard input is a terminal: pipe YAML into it, as in `kustomize build DIR | skysail up -`"
            ),
            1 => Some(text(io::stdin().lock())?),
            _ => bail!("standard input (-) is given more than once"),
        };
        let absolute = paths.iter().map(fs::canonicalize);
        Ok(Self { paths: absolute.collect::<io::Result<_>>()?, text })
    }

    /// Returns the default name of the mesh: the first path's, with invalid characters replaced.
    pub(crate) fn mesh_name(&self) -> String {
        let first = self.paths.first().and_then(|path| path.file_stem());
        let name = first.unwrap_or_default().to_string_lossy();
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        if name.is_empty() { "mesh".to_owned() } else { name }
    }

    /// Returns the paths for a sentence.
    pub(crate) fn names(paths: &[PathBuf], folder: &Path) -> String {
        let stdin = folder.join(FILE);
        let name = |path: &PathBuf| match *path == stdin {
            true => STDIN_NAME.to_owned(),
            false => path.display().to_string(),
        };
        paths.iter().map(name).collect::<Vec<_>>().join(", ")
    }

    /// Replaces the path of the file for standard input in a message by the user's name for it.
    pub(crate) fn named_in(message: &str, folder: &Path) -> String {
        message.replace(&*folder.join(FILE).to_string_lossy(), STDIN)
    }

    /// Returns the absolute paths to run. Writes standard input to a file in the mesh's folder.
    pub(crate) fn into_paths(self, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let Self { mut paths, text } = self;
        if let Some(text) = text {
            let file = folder.join(FILE);
            let written = fs::create_dir_all(folder.join(FOLDER)).and_then(|()| fs::write(&file, text));
            written.with_context(|| format!("writing {}", file.display()))?;
            paths.push(file);
        }
        Ok(paths)
    }
}

/// Reads a text of at most the maximum size of a file.
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
    fn standard_input_is_bounded_and_must_not_be_empty() {
        let checked = |bytes: &[u8]| text(bytes).map_err(|error| error.to_string());
        assert_eq!(checked(b"kind: Pod\n"), Ok("kind: Pod\n".to_owned()));
        assert!(checked(b" \n\n").unwrap_err().contains("is empty"));
        assert!(checked(b"\xff").unwrap_err().contains("UTF-8"));
        let endless = text(io::repeat(b'x')).unwrap_err().to_string();
        assert!(endless.contains("more than 32 MiB"), "{endless}");
    }

    #[test]
    fn the_name_of_the_mesh_follows_from_the_first_path() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("my shop.yaml");
        fs::write(&file, "").unwrap();
        let input =
            |path: Option<&Path>| Input::read(path.map(Path::to_owned).into_iter().collect()).unwrap();
        assert_eq!(input(Some(&file)).mesh_name(), "my-shop");
        assert_eq!(input(None).mesh_name(), "mesh");
    }

    #[test]
    fn standard_input_becomes_a_file_of_the_mesh() {
        let folder = tempfile::tempdir().unwrap();
        let input = Input { paths: vec!["/a".into()], text: Some("a: b".to_owned()) };
        let paths = input.into_paths(folder.path()).unwrap();
        assert_eq!(paths[0], Path::new("/a"));
        assert_eq!(fs::read_to_string(&paths[1]).unwrap(), "a: b");
        assert_eq!(Input::names(&paths, folder.path()), "/a, standard input");
        let message = format!("error: {}:1: Service a", paths[1].display());
        assert_eq!(Input::named_in(&message, folder.path()), "error: -:1: Service a");
    }
}
