//! Container images of the programs, and their installation in a Kubernetes cluster.
//!
//! [`Image`] is made from a program and the libraries that it loads, without a container engine. [`objects()`] returns
//! what an installation consists of. [`install()`] and [`uninstall()`] apply and remove these objects.

mod changes;
mod connection;
mod image;
mod install;
mod object;
mod objects;
mod preflight;
mod settings;
mod uninstall;
mod wait;

pub use self::{
    connection::Connection,
    image::{Image, ImageSpec},
    install::{InstallOptions, install},
    object::Object,
    objects::objects,
    settings::{Installation, SettingsError, Target, Validation, check_image},
    uninstall::{Installed, uninstall},
    wait::NotInTime,
};
