"""`forerun train-drafter`: drafts and heads for a target model, distilled from text that the target writes itself."""
