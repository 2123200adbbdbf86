//! Detection of folders that are the input of kustomize or Helm. Read as plain objects, their files would cause errors,
//! or objects that the user does not want.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::error::{Context as _, Error};

/// Names of the file that identifies a kustomize folder.
const KUSTOMIZATIONS: [&str; 3] = ["kustomization.yaml", "kustomization.yml", "Kustomization"];
/// Name of the file that identifies a Helm chart.
const CHART: &str = "Chart.yaml";
/// Maximum depth of folders, and maximum number of folders, that are searched.
const DEPTH: usize = 16;
const FOLDERS: usize = 10_000;

/// Refuses kustomize folders and Helm charts, in these folders or beside these files. The error says how to use them.
///
/// # Errors
/// When one is found, or a folder cannot be read.
pub fn refuse_templates(paths: &[PathBuf]) -> Result<(), Error> {
    let mut found = Vec::new();
    for path in paths {
        if path.is_dir() {
            let mut left = FOLDERS;
            walk(path, DEPTH, &mut left, &mut found).context(format!("reading {}", path.display()))?;
        } else {
            found.extend(of_file(path));
        }
    }
    let (Some(first), more) = (found.first(), found.len().saturating_sub(1)) else { return Ok(()) };
    let more = match more {
        0 => String::new(),
        1 => "\nThere is one more such folder".to_owned(),
        more => format!("\nThere are {more} more such folders"),
    };
    Err(Error::Refused(format!("{first}{more}")))
}

/// Returns the error text for a file that describes a kustomize folder or a chart, or is a chart's template.
fn of_file(file: &Path) -> Option<String> {
    let folder = parent(file);
    let name = file.file_name()?.to_str()?;
    if KUSTOMIZATIONS.contains(&name) || name == CHART {
        return of_folder(folder);
    }
    let is_template = folder.file_name().is_some_and(|name| name == "templates");
    let chart = is_template.then(|| parent(folder))?;
    chart.join(CHART).is_file().then(|| helm(chart))
}

/// Returns the error text for a folder.
fn of_folder(folder: &Path) -> Option<String> {
    if folder.join(CHART).is_file() {
        return Some(helm(folder));
    }
    let name = KUSTOMIZATIONS.into_iter().find(|name| folder.join(name).is_file())?;
    Some(format!(
        "{} is a kustomize folder ({name}): build its objects first:\n    kustomize build {} | skysail up -",
        folder.display(),
        quoted(folder)
    ))
}

fn helm(chart: &Path) -> String {
    let full = chart.canonicalize().unwrap_or_else(|_| chart.to_owned());
    let name = full.file_name().map_or_else(|| "NAME".into(), |name| quoted(Path::new(name)));
    format!(
        "{} is a Helm chart ({CHART}): render its templates first:\n    helm template {name} {} | skysail up -",
        chart.display(),
        quoted(chart)
    )
}

/// Searches a folder and its subfolders, except hidden ones, which are not read either. Subfolders of a found folder
/// are not searched.
fn walk(folder: &Path, depth: usize, left: &mut usize, found: &mut Vec<String>) -> io::Result<()> {
    if let Some(problem) = of_folder(folder) {
        found.push(problem);
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        // Links may form cycles.
        if is_hidden || !entry.file_type()?.is_dir() || depth == 0 || *left == 0 {
            continue;
        }
        *left -= 1;
        walk(&entry.path(), depth - 1, left, found)?;
    }
    Ok(())
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Quotes a path for a shell.
fn quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    let is_plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+:,@".contains(c));
    if is_plain && !text.starts_with('-') {
        text.into_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(files: &[&str], path: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let file = folder.path().join(file);
            fs::create_dir_all(parent(&file)).unwrap();
            fs::write(file, "").unwrap();
        }
        let refusal = refuse_templates(&[folder.path().join(path)]).err().map(|error| error.to_string());
        refusal.unwrap_or_default().replace(&*folder.path().to_string_lossy(), "ROOT")
    }

    #[test]
    fn kustomize_folders_are_detected() {
        for name in KUSTOMIZATIONS {
            let file = format!("shop/{name}");
            let expected = format!(
                "ROOT/shop is a kustomize folder ({name}): build its objects first:\n    kustomize build ROOT/shop | skysail up -"
            );
            for path in ["shop", "", &file] {
                assert_eq!(refusal(&[&file, "shop/web.yaml"], path).replace("ROOT//", "ROOT/"), expected);
            }
        }
        let several = refusal(&["a/kustomization.yaml", "b/kustomization.yaml", "c/kustomization.yaml"], "");
        assert!(several.ends_with("\nThere are 2 more such folders"), "{several}");
    }

    #[test]
    fn helm_charts_are_detected() {
        let files = [
            "charts/my shop/Chart.yaml",
            "charts/my shop/templates/web.yaml",
            "charts/my shop/kustomization.yaml",
        ];
        let expected = "ROOT/charts/my shop is a Helm chart (Chart.yaml): render its templates first:\n    \
                        helm template 'my shop' 'ROOT/charts/my shop' | skysail up -";
        for path in ["charts", "charts/my shop", files[0], files[1]] {
            assert_eq!(refusal(&files, path), expected);
        }
    }

    #[test]
    fn other_folders_and_files_beside_a_kustomization_are_not_refused() {
        for path in ["shop", "shop/web.yaml", "templates/web.yaml", "nothing"] {
            assert_eq!(
                refusal(&["shop/web.yaml", "templates/web.yaml", "shop/.git/kustomization.yaml"], path),
                ""
            );
        }
        assert_eq!(refusal(&["shop/kustomization.yaml", "shop/web.yaml"], "shop/web.yaml"), "");
    }
}
