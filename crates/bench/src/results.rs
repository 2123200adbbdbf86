//! Result files: their location, and the protection of earlier ones.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;
use skysail_core::stdio;

use crate::stage::{self, Output};

/// Maximum number that is appended to a file name.
const MAX_NUMBER: u32 = 1_000;

/// Where the result of a benchmark is stored, and how it is printed.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ResultArgs {
    /// Result file (JSON). Default: a file in the current directory with the time in its name. An existing file is
    /// refused.
    #[arg(long, value_name = "FILE")]
    pub(crate) result: Option<PathBuf>,

    /// Output format.
    #[arg(long, value_name = "FORM", value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

impl ResultArgs {
    /// Returns true if no argument was given.
    pub(crate) fn is_default(&self) -> bool {
        self.result.is_none() && self.output == Output::Table
    }

    /// Returns the result file.
    ///
    /// # Errors
    /// As for [`ResultFile::new`].
    pub(crate) fn file(&self, benchmark: &str) -> anyhow::Result<ResultFile> {
        ResultFile::new(self.result.as_deref(), benchmark)
    }

    /// Writes the result file and prints the result.
    pub(crate) fn publish<R: Serialize>(
        &self,
        file: ResultFile,
        report: &R,
        table: impl Fn(&R) -> String,
    ) -> anyhow::Result<()> {
        let (file, json) = file.write(report)?;
        match self.output {
            Output::Table => {
                stdio::print(table(report))?;
                stdio::print(format_args!("\nThe result is in {}.", file.display()))?;
            }
            Output::Json => stdio::print(json)?,
        }
        Ok(())
    }
}

/// File for a result that has not been written yet.
pub(crate) struct ResultFile {
    path: PathBuf,
}

impl ResultFile {
    /// Returns the file of `--result`, or `skysail-bench-NAME-TIME.json` in the current directory.
    ///
    /// # Errors
    /// If the file exists or cannot be written. No file is created.
    pub(crate) fn new(given: Option<&Path>, benchmark: &str) -> anyhow::Result<Self> {
        let Some(path) = given else {
            let path = PathBuf::from(default_name(benchmark, stage::now()));
            check_writable("the result file", &path)?;
            return Ok(Self { path });
        };
        if path.is_file() {
            bail!(
                "--result {}: the file exists, and an earlier result is not overwritten; name another file, or leave --result \
                 out for a name with the time",
                path.display()
            );
        }
        check_writable("--result", path)?;
        Ok(Self { path: path.to_owned() })
    }

    /// Returns the file `NAME.json` in a folder, and creates the folder.
    ///
    /// # Errors
    /// If the folder or the file cannot be written.
    pub(crate) fn in_folder(folder: &Path, name: &str) -> anyhow::Result<Self> {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create the folder {}", folder.display()))?;
        let path = folder.join(format!("{name}.json"));
        check_writable("the result file", &path)?;
        Ok(Self { path })
    }

    /// Writes the result as JSON. Returns the file and the text. If a file of this name exists, the name of the new one
    /// gets a number.
    pub(crate) fn write(self, result: &impl Serialize) -> anyhow::Result<(PathBuf, String)> {
        let json = serde_json::to_string_pretty(result)?;
        let (path, mut file) = create(&self.path)
            .with_context(|| format!("cannot write the result to {}", self.path.display()))?;
        file.write_all(format!("{json}\n").as_bytes())
            .with_context(|| format!("cannot write the result to {}", path.display()))?;
        Ok((path, json))
    }
}

/// Returns a name like `skysail-bench-latency-20261125-005211.json`, in UTC.
fn default_name(benchmark: &str, now: u64) -> String {
    let now = stage::utc(now);
    let (year, month, day) = now.to_calendar_date();
    let (hour, minute, second) = now.to_hms();
    format!(
        "skysail-bench-{benchmark}-{year:04}{:02}{day:02}-{hour:02}{minute:02}{second:02}.json",
        u8::from(month)
    )
}

/// Creates the file, or one with a number in its name if it exists. Opens an existing special file, such as a pipe.
pub(crate) fn create(path: &Path) -> io::Result<(PathBuf, File)> {
    if path.exists() && !path.is_file() {
        return Ok((path.to_owned(), OpenOptions::new().write(true).open(path)?));
    }
    let (stem, extension) = (path.file_stem().unwrap_or_default(), path.extension());
    for number in 1..=MAX_NUMBER {
        let mut name = stem.to_owned();
        if number > 1 {
            name.push(format!("-{number}"));
        }
        if let Some(extension) = extension {
            name.push(".");
            name.push(extension);
        }
        let path = path.with_file_name(name);
        match File::create_new(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return Ok((path, made?)),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Returns the text of a file or a special file, such as a pipe, of at most `max` bytes.
///
/// # Errors
/// The file cannot be read, is not UTF-8 or has more bytes. The error does not name the file.
pub(crate) fn read_text(file: &Path, max: u64) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    File::open(file)?.take(max + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= max, "it has more than {max} bytes, the maximum for such a file");
    String::from_utf8(bytes).context("it is not UTF-8 text")
}

/// Fails if a file cannot be written; the error names the option. Creates no file.
pub(crate) fn check_writable(option: &str, file: &Path) -> anyhow::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let checked = if file.exists() {
        fs::OpenOptions::new().append(true).open(file).map(drop)
    } else {
        tempfile::tempfile_in(folder).map(drop)
    };
    checked.with_context(|| format!("{option} {}: it cannot be written", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_names_carry_the_time() {
        assert_eq!(default_name("dns", 1_795_567_931), "skysail-bench-dns-20261125-005211.json");
        assert_eq!(default_name("dns", u64::MAX), "skysail-bench-dns-19700101-000000.json");
    }

    #[test]
    fn an_existing_result_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        let first = ResultFile::new(Some(&path), "dns").unwrap();
        let second = ResultFile::new(Some(&path), "dns").unwrap();
        assert_eq!(first.write(&1).unwrap(), (path.clone(), "1".to_owned()));
        assert_eq!(second.write(&2).unwrap().0, folder.path().join("x-2.json"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "1\n");
        let error = ResultFile::new(Some(&path), "dns").err().unwrap().to_string();
        assert!(
            error.contains("x.json: the file exists, and an earlier result is not overwritten"),
            "{error}"
        );
    }

    #[test]
    fn files_and_devices_are_read_up_to_the_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        fs::write(&path, "1234").unwrap();
        assert_eq!(read_text(&path, 4).unwrap(), "1234");
        for path in [&path, Path::new("/dev/zero")] {
            let error = read_text(path, 3).unwrap_err().to_string();
            assert!(error.contains("more than 3 bytes"), "{error}");
        }
        fs::write(&path, [0xff]).unwrap();
        assert!(read_text(&path, 3).unwrap_err().to_string().contains("not UTF-8"));
        assert!(read_text(Path::new("no/file"), 3).is_err());
    }

    #[test]
    fn a_device_accepts_any_number_of_results() {
        let path = Path::new("/dev/null");
        for _ in 0..2 {
            let (written, _) = ResultFile::new(Some(path), "dns").unwrap().write(&1).unwrap();
            assert_eq!(written, path);
        }
    }
}
