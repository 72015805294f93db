r"""Interface: the few words that the pages themselves say, in every language they speak.

Everything else a reader sees comes from the notes. A language that is not listed here is shown with English
words around its notes.
"""

from __future__ import annotations

__all__ = ["LANGUAGE_NAMES", "tag", "words"]

LANGUAGE_NAMES = {"en": "English", "zh_CN": "中文", "ja": "日本語"}

_ENGLISH = {
    "skip": "Skip to the notes",
    "contents": "On this page",
    "pages": "Pages",
    "previous": "Previous",
    "next": "Next",
    "search": "Search",
    "search_all": "Search all pages",
    "no_results": "Nothing found",
    "language": "Language",
    "theme": "Theme: ",
    "auto": "auto",
    "light": "light",
    "dark": "dark",
    "copy": "Copy",
    "copied": "Copied",
    "paper": "Paper: ",
    "source": "Source",
    "notebook": "Notebook",
    "permalink": "Link to this note",
    "path": "Where this page is",
    "symbols": "Symbols and their names in the code",
    "untranslated": "Not yet translated",
    "translated": "{done} of {all} blocks translated",
    "keys": "j, k: next, previous note. /: search. c: copy. t: theme.",
    "needs_script": "Searching needs JavaScript. The list of all pages is on the front page.",
    "notes_and_code": "Notes and code",
    "unreadable": "Python cannot parse this file; it is shown as it is.",
    "Source": "Source", "Deviation": "Deviation", "Cost": "Cost", "Raises": "Raises", "Returns": "Returns",
    "Yields": "Yields", "Args": "Arguments", "Arguments": "Arguments", "Parameters": "Parameters",
    "Attributes": "Attributes", "Example": "Example",
    "Examples": "Examples", "Note": "Note", "Notes": "Notes",
    "Shape": "Shape", "Shapes": "Shapes", "Units": "Units", "Warning": "Warning", "References": "References",
}  # fmt: skip

_WORDS = {
    "zh_CN": {
        "skip": "跳到注解",
        "contents": "本页内容",
        "pages": "页面",
        "previous": "上一页",
        "next": "下一页",
        "search": "搜索",
        "search_all": "搜索所有页面",
        "no_results": "没有结果",
        "language": "语言",
        "theme": "主题：",
        "auto": "自动",
        "light": "浅色",
        "dark": "深色",
        "copy": "复制",
        "copied": "已复制",
        "paper": "论文：",
        "source": "源代码",
        "notebook": "笔记本",
        "permalink": "此注解的永久链接",
        "path": "当前位置",
        "symbols": "符号与代码中的名称",
        "untranslated": "尚未翻译",
        "translated": "已翻译 {done} / {all} 段",
        "keys": "j、k：下一条、上一条注解。/：搜索。c：复制。t：主题。",
        "needs_script": "搜索需要 JavaScript。首页列出了所有页面。",
        "notes_and_code": "注解与代码",
        "unreadable": "Python 无法解析此文件，这里按原样显示。",
        "Source": "出处", "Deviation": "与论文的差异", "Cost": "开销", "Raises": "异常", "Returns": "返回值",
        "Yields": "产出", "Args": "参数", "Arguments": "参数", "Parameters": "参数", "Attributes": "属性",
        "Example": "示例", "Examples": "示例",
        "Note": "说明", "Notes": "说明", "Shape": "形状", "Shapes": "形状",
        "Units": "单位", "Warning": "警告", "References": "参考文献",
    },
    "ja": {
        "skip": "注釈へ移動",
        "contents": "このページの内容",
        "pages": "ページ一覧",
        "previous": "前のページ",
        "next": "次のページ",
        "search": "検索",
        "search_all": "全ページを検索",
        "no_results": "見つかりませんでした",
        "language": "言語",
        "theme": "テーマ：",
        "auto": "自動",
        "light": "ライト",
        "dark": "ダーク",
        "copy": "コピー",
        "copied": "コピーしました",
        "paper": "論文：",
        "source": "ソース",
        "notebook": "ノートブック",
        "permalink": "この注釈への固定リンク",
        "path": "現在の位置",
        "symbols": "記号とコード中の名前",
        "untranslated": "未翻訳",
        "translated": "{all} ブロック中 {done} ブロックを翻訳済み",
        "keys": "j、k：次、前の注釈。/：検索。c：コピー。t：テーマ。",
        "needs_script": "検索には JavaScript が必要です。全ページの一覧はトップページにあります。",
        "notes_and_code": "注釈とコード",
        "unreadable": "Python で解析できないファイルのため、そのまま表示しています。",
        "Source": "出典", "Deviation": "論文との違い", "Cost": "計算量", "Raises": "例外",
        "Returns": "戻り値",
        "Yields": "生成する値", "Args": "引数", "Arguments": "引数", "Parameters": "引数",
        "Attributes": "属性",
        "Example": "例", "Examples": "例",
        "Note": "補足", "Notes": "補足", "Shape": "形状", "Shapes": "形状",
        "Units": "単位", "Warning": "警告", "References": "参考文献",
    },
}  # fmt: skip


def words(language: str) -> dict[str, str]:
    r"""The interface in one language, English where it has no word."""
    return {**_ENGLISH, **_WORDS.get(language, {})}


def tag(language: str) -> str:
    r"""A locale name as a language tag: `zh_CN` is `zh-CN` in HTML and in addresses."""
    return language.replace("_", "-")
